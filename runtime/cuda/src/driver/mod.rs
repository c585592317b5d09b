//! The driver's floor: a device, its stream, memory ranges, modules, events and graphs, each freed on drop.
//!
//! All of the `unsafe` that talks to the driver is here. What holds for every block: `Device::open` saw that the driver's
//! library is there and made its primary context current on this thread, and handles are used only on that thread (they
//! are not `Send`) and freed once.

mod copy_streams;
mod snapshot;

pub use copy_streams::CopyStreams;
pub use snapshot::{Aside, snapshot};

use crate::dylib;
use crate::launch::{Props, TmaDesc};
use cudarc::driver::sys;
use perilune_core::DType;
use perilune_core::byte_size;
use perilune_core::error::{Error, Result};
use std::ffi::{CStr, CString, c_void};
use std::ptr::{null, null_mut};
use std::rc::Rc;
use std::sync::Arc;

/// A device address.
pub type Address = u64;

/// Turns a status into an error that names the call.
pub(crate) fn check(status: sys::CUresult, what: &str) -> Result<()> {
    if status as u32 == 0 {
        return Ok(());
    }
    let mut name: *const std::ffi::c_char = null();
    // SAFETY: the driver fills in a pointer to a static string, or leaves it null.
    let text = unsafe {
        sys::cuGetErrorString(status, &mut name);
        if name.is_null() { String::new() } else { CStr::from_ptr(name).to_string_lossy().into_owned() }
    };
    Err(Error::system("cuda", format!("{what} failed: {text} (CUDA error {})", status as u32)))
}

/// One GPU with a stream of its own; all work of it goes there, in order. (Copies out may go beside it: `driver/copy_streams.rs`.)
pub struct Device {
    pub ordinal: usize,
    pub name: String,
    pub props: Props,
    pub total_bytes: usize,
    pub(crate) stream: sys::CUstream,
    device: sys::CUdevice,
    /// As 13000 for CUDA 13.0.
    pub driver_version: i32,
    /// What checkpoints copy through, on threads of their own.
    pub aside: Arc<Aside>,
}

impl Device {
    pub fn open(ordinal: usize) -> Result<Rc<Device>> {
        dylib::load("CUDA driver")?;
        // SAFETY: the library is there; out-pointers are to locals.
        unsafe {
            check(sys::cuInit(0), "starting the CUDA driver")?;
            let mut count = 0;
            check(sys::cuDeviceGetCount(&mut count), "counting GPUs")?;
            if ordinal >= count as usize {
                let message = format!("there is no device cuda:{ordinal}: {count} found");
                return Err(Error::system("cuda", message).hint("perilune doctor lists devices; they count from 0"));
            }
            let mut device = 0;
            check(sys::cuDeviceGet(&mut device, ordinal as i32), "opening the GPU")?;
            let mut context = null_mut();
            check(sys::cuDevicePrimaryCtxRetain(&mut context, device), "making a context on the GPU")?;
            check(sys::cuCtxSetCurrent(context), "making the context current")?;
            let mut stream = null_mut();
            let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            check(sys::cuStreamCreate(&mut stream, flags), "making a stream")?;
            let mut name = [0; 128];
            check(sys::cuDeviceGetName(name.as_mut_ptr(), 127, device), "naming the GPU")?;
            let name = CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned();
            let mut total_bytes = 0;
            check(sys::cuDeviceTotalMem_v2(&mut total_bytes, device), "asking for the size of memory")?;
            let mut driver_version = 0;
            check(sys::cuDriverGetVersion(&mut driver_version), "asking for the driver's version")?;
            let read = |attribute| -> Result<u32> {
                let mut value = 0;
                check(sys::cuDeviceGetAttribute(&mut value, attribute, device), "reading an attribute of the GPU")?;
                Ok(value as u32)
            };
            use sys::CUdevice_attribute::*;
            let arch = (
                read(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                read(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            );
            if arch < (8, 0) {
                let message = format!("{name} has compute capability {}.{}; 8.0 or newer is needed", arch.0, arch.1);
                return Err(Error::system("cuda", message).hint("run with --device cpu"));
            }
            let props = Props {
                arch,
                sms: read(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
                shared_bytes: read(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            };
            let aside = Arc::default();
            Ok(Rc::new(Device { ordinal, name, props, total_bytes, stream, device, driver_version, aside }))
        }
    }

    /// Where the GPU is, as `00000000:1B:00.0`.
    pub fn pci_address(&self) -> Option<String> {
        let mut text = [0i8; 32];
        // SAFETY: the buffer is as long as is said.
        let status = unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), text.len() as i32, self.device) };
        let bytes: Vec<u8> = text.iter().take_while(|c| **c != 0).map(|c| *c as u8).collect();
        String::from_utf8(bytes).ok().filter(|t| status as i32 == 0 && !t.is_empty())
    }

    /// The highest clock of the SMs, in Hz.
    pub fn clock_hz(&self) -> Option<f64> {
        let mut khz = 0;
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE;
        // SAFETY: the out-pointer is to a local.
        let status = unsafe { sys::cuDeviceGetAttribute(&mut khz, attribute, self.device) };
        (status as i32 == 0 && khz > 0).then(|| f64::from(khz) * 1e3)
    }

    /// Waits for all queued work.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: see the head of the file.
        check(unsafe { sys::cuStreamSynchronize(self.stream) }, "waiting for the GPU")
    }

    /// Bytes nobody has taken.
    pub fn free_bytes(&self) -> usize {
        let (mut free, mut total) = (0, 0);
        // SAFETY: out-pointers are to locals.
        unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) };
        free
    }

    /// Queues a copy to the device. `bytes` must stay as it is until the stream is synchronized, unless it is pageable
    /// (then the driver takes a copy before it returns).
    pub fn upload(&self, to: Address, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: `to` has room for the bytes (callers check sizes); the source is a slice.
        let status = unsafe { sys::cuMemcpyHtoDAsync_v2(to, bytes.as_ptr().cast(), bytes.len(), self.stream) };
        check(status, "copying to the GPU")
    }

    /// Queues a copy within the device.
    pub fn copy(&self, from: Address, to: Address, nbytes: usize) -> Result<()> {
        // SAFETY: both places hold that many bytes, and do not overlap (callers check).
        let status = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, nbytes, self.stream) };
        check(status, "copying on the GPU")
    }

    /// Copies from the device after all queued work, and waits for it.
    pub fn download(&self, from: Address, bytes: &mut [u8]) -> Result<()> {
        if !bytes.is_empty() {
            // SAFETY: `from` holds that many bytes (callers check sizes); the copy is over when the stream is idle.
            let status =
                unsafe { sys::cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), from, bytes.len(), self.stream) };
            check(status, "copying from the GPU")?;
        }
        self.synchronize()
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: the stream is this device's own, and everything that used it holds an `Rc` of it.
        unsafe {
            sys::cuStreamSynchronize(self.stream);
            sys::cuStreamDestroy_v2(self.stream);
            sys::cuDevicePrimaryCtxRelease_v2(self.device);
        }
    }
}

/// Address space of a device that grows from its start without moving.
pub struct Range {
    device: Rc<Device>,
    pub base: Address,
    reserved: usize,
    mapped: usize,
    granularity: usize,
    parts: Vec<(sys::CUmemGenericAllocationHandle, usize, usize)>,
}

impl Range {
    pub fn new(device: &Rc<Device>) -> Result<Range> {
        let prop = Range::prop(device);
        let mut granularity = 0;
        let option = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        let mut base = 0;
        // SAFETY: out-pointers are to locals.
        let reserved = unsafe {
            let status = sys::cuMemGetAllocationGranularity(&mut granularity, &prop, option);
            check(status, "asking for the allocation granularity")?;
            let reserved = device.total_bytes.next_multiple_of(granularity);
            check(sys::cuMemAddressReserve(&mut base, reserved, 0, 0, 0), "reserving addresses on the GPU")?;
            reserved
        };
        Ok(Range { device: device.clone(), base, reserved, mapped: 0, granularity, parts: Vec::new() })
    }

    fn prop(device: &Device) -> sys::CUmemAllocationProp {
        // SAFETY: a plain C structure for which zero means "default".
        let mut prop: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        prop.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        prop.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        prop.location.id = device.device;
        prop
    }

    /// Bytes that have memory behind them.
    pub fn mapped(&self) -> usize {
        self.mapped
    }

    /// Puts memory behind the first `nbytes`.
    pub fn ensure(&mut self, nbytes: usize) -> Result<()> {
        if nbytes <= self.mapped {
            return Ok(());
        }
        let more = (nbytes - self.mapped).next_multiple_of(self.granularity);
        let out = |free: usize| {
            let message = format!(
                "out of memory: {} more are asked for, {} of {} are free",
                byte_size::show(more),
                byte_size::show(free),
                byte_size::show(self.device.total_bytes)
            );
            Error::memory(&format!("cuda:{}", self.device.ordinal), message)
        };
        if self.mapped + more > self.reserved {
            return Err(out(self.device.free_bytes()));
        }
        let prop = Range::prop(&self.device);
        let at = self.base + self.mapped as u64;
        // SAFETY: the addresses are reserved by this range and not mapped yet; the handle is new.
        unsafe {
            let mut handle = 0;
            let mut take = || sys::cuMemCreate(&mut handle, more, &prop, 0) as u32 == 0;
            // A checkpoint's copies are on their way out, and need not be why a step finds no room.
            let taken = take() || (self.device.aside.wait() && take());
            if !taken {
                return Err(out(self.device.free_bytes()));
            }
            check(sys::cuMemMap(at, more, 0, handle, 0), "mapping memory on the GPU")?;
            let mut access: sys::CUmemAccessDesc = std::mem::zeroed();
            access.location = prop.location;
            access.flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
            check(sys::cuMemSetAccess(at, more, &access, 1), "opening memory on the GPU")?;
            self.parts.push((handle, self.mapped, more));
        }
        self.mapped += more;
        Ok(())
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        // SAFETY: nothing queued uses the memory once the stream is idle; each part was mapped once.
        unsafe {
            sys::cuStreamSynchronize(self.device.stream);
            for &(handle, at, nbytes) in &self.parts {
                sys::cuMemUnmap(self.base + at as u64, nbytes);
                sys::cuMemRelease(handle);
            }
            sys::cuMemAddressFree(self.base, self.reserved);
        }
    }
}

/// Host memory that the GPU can reach.
pub struct Pinned {
    _device: Rc<Device>,
    ptr: *mut u8,
    nbytes: usize,
    pub address: Address,
}

impl Pinned {
    pub fn new(device: &Rc<Device>, nbytes: usize) -> Result<Pinned> {
        let mut ptr: *mut c_void = null_mut();
        let mut address = 0;
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: out-pointers are to locals; the memory is zeroed before anyone reads it.
        unsafe {
            check(sys::cuMemHostAlloc(&mut ptr, nbytes, flags), "taking pinned host memory")?;
            check(sys::cuMemHostGetDevicePointer_v2(&mut address, ptr, 0), "mapping pinned host memory")?;
            ptr.cast::<u8>().write_bytes(0, nbytes);
        }
        Ok(Pinned { _device: device.clone(), ptr: ptr.cast(), nbytes, address })
    }

    /// Word `k` of it, as the GPU last wrote it.
    pub fn read(&self, k: usize) -> u64 {
        assert!((k + 1) * 8 <= self.nbytes);
        // SAFETY: in bounds and aligned; volatile, since the GPU writes it.
        unsafe { self.ptr.cast::<u64>().add(k).read_volatile() }
    }

    pub fn write(&self, k: usize, word: u64) {
        assert!((k + 1) * 8 <= self.nbytes);
        // SAFETY: in bounds and aligned.
        unsafe { self.ptr.cast::<u64>().add(k).write_volatile(word) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated by `cuMemHostAlloc`; callers drop it when the stream is idle.
        unsafe { sys::cuMemFreeHost(self.ptr.cast()) };
    }
}

/// Loaded machine code.
pub struct Module {
    _device: Rc<Device>,
    module: sys::CUmodule,
}

/// A function of a module, valid as long as it.
#[derive(Clone)]
pub struct Entry {
    _module: Rc<Module>,
    pub(crate) function: sys::CUfunction,
}

impl Module {
    pub fn load(device: &Rc<Device>, cubin: &[u8]) -> Result<Rc<Module>> {
        let mut module = null_mut();
        // SAFETY: the image is a whole CUBIN: NVRTC made it, and the cache checks its hash.
        check(unsafe { sys::cuModuleLoadData(&mut module, cubin.as_ptr().cast()) }, "loading a kernel")?;
        Ok(Rc::new(Module { _device: device.clone(), module }))
    }

    pub fn entry(self: &Rc<Module>, name: &str) -> Result<Entry> {
        let text = CString::new(name).map_err(|_| Error::system("cuda", "this is a bug: a kernel's name holds a 0"))?;
        let mut function = null_mut();
        // SAFETY: the module is loaded; the name ends in 0.
        let status = unsafe { sys::cuModuleGetFunction(&mut function, self.module, text.as_ptr()) };
        check(status, &format!("finding the kernel {name}"))?;
        Ok(Entry { _module: self.clone(), function })
    }
}

impl Entry {
    /// Lets a block have that much dynamic shared memory.
    pub fn allow_shared(&self, nbytes: u32) -> Result<()> {
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is loaded.
        let status = unsafe { sys::cuFuncSetAttribute(self.function, attribute, nbytes as i32) };
        check(status, "asking for shared memory")
    }

    /// Queues a launch. Each argument is the bytes of one parameter.
    pub fn launch(
        &self,
        device: &Device,
        grid: [u32; 3],
        block: [u32; 3],
        shared: u32,
        args: &mut [*mut c_void],
    ) -> Result<()> {
        // SAFETY: `args` point to as many values as the kernel has parameters, of their sizes (whoever made the launch
        // made the kernel's text); the driver copies them before it returns.
        let status = unsafe {
            sys::cuLaunchKernel(
                self.function,
                grid[0],
                grid[1],
                grid[2],
                block[0],
                block[1],
                block[2],
                shared,
                device.stream,
                args.as_mut_ptr(),
                null_mut(),
            )
        };
        check(status, "launching a kernel")
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: entries hold the module; queued launches are over or finish first (the driver waits).
        unsafe { sys::cuModuleUnload(self.module) };
    }
}

/// What a kernel gives to the copy engine to find a tensor.
pub struct TensorMap(sys::CUtensorMap);

impl TensorMap {
    pub fn new(address: Address, boxes: &TmaDesc) -> Result<TensorMap> {
        let dtype = match boxes.dtype {
            DType::BF16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            DType::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            other => return Err(Error::system("cuda", format!("this is a bug: a tensor map over {other}"))),
        };
        // SAFETY: a plain C structure; the driver fills it in from the arrays, which have as many places as dims.
        unsafe {
            let mut map: sys::CUtensorMap = std::mem::zeroed();
            let status = sys::cuTensorMapEncodeTiled(
                &mut map,
                dtype,
                4,
                address as *mut c_void,
                boxes.dims.as_ptr(),
                boxes.strides.as_ptr(),
                boxes.shape.as_ptr(),
                [1u32; 4].as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            );
            check(status, "making a tensor map")?;
            Ok(TensorMap(map))
        }
    }

    /// For `Entry::launch`, while the map lives.
    pub fn pointer(&self) -> *mut c_void {
        std::ptr::from_ref(&self.0).cast_mut().cast()
    }
}

/// A point in the stream whose time can be read.
pub struct Event {
    device: Rc<Device>,
    event: sys::CUevent,
}

impl Event {
    /// Records now.
    pub fn record(device: &Rc<Device>) -> Result<Event> {
        let mut event = null_mut();
        // SAFETY: out-pointer to a local; the stream is the device's.
        unsafe {
            check(sys::cuEventCreate(&mut event, 0), "making an event")?;
            check(sys::cuEventRecord(event, device.stream), "recording an event")?;
        }
        Ok(Event { device: device.clone(), event })
    }

    /// One that is not recorded yet and keeps no time, which costs less.
    pub fn untimed(device: &Rc<Device>) -> Result<Event> {
        let mut event = null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: out-pointer to a local.
        check(unsafe { sys::cuEventCreate(&mut event, flags) }, "making an event")?;
        Ok(Event { device: device.clone(), event })
    }

    /// Records now, and forgets what it recorded before.
    pub fn again(&self) -> Result<()> {
        // SAFETY: the event is alive; the stream is the device's.
        check(unsafe { sys::cuEventRecord(self.event, self.device.stream) }, "recording an event")
    }

    /// Whether all that was queued before it is done; also if it was never recorded.
    pub fn is_over(&self) -> bool {
        // SAFETY: the event is alive.
        unsafe { sys::cuEventQuery(self.event) as u32 == 0 }
    }

    /// Waits until all that was queued before it is done.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: the event is alive.
        check(unsafe { sys::cuEventSynchronize(self.event) }, "waiting for the GPU")
    }

    /// Seconds from `earlier` to this; the stream must be idle.
    pub fn since(&self, earlier: &Event) -> Result<f64> {
        if self.device.driver_version < 12_080 {
            let message =
                format!("timing kernels needs a driver for CUDA 12.8; this one is for {}", self.device.driver_version);
            return Err(Error::system("cuda", message));
        }
        let mut ms = 0f32;
        // SAFETY: both events are recorded; the driver has the entry point.
        let status = unsafe { sys::cuEventElapsedTime_v2(&mut ms, earlier.event, self.event) };
        check(status, "reading an event")?;
        Ok(f64::from(ms) * 1e-3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by `record` or `untimed`.
        unsafe { sys::cuEventDestroy_v2(self.event) };
    }
}

/// A recorded sequence of launches that replays as one.
pub struct Replay {
    device: Rc<Device>,
    exec: sys::CUgraphExec,
}

impl Replay {
    /// Records what `f` queues instead of running it.
    pub fn capture(device: &Rc<Device>, f: impl FnOnce() -> Result<()>) -> Result<Replay> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is the device's; a capture that began is always ended.
        unsafe {
            check(sys::cuStreamBeginCapture_v2(device.stream, mode), "starting a capture")?;
            let done = f();
            let mut graph = null_mut();
            let ended = check(sys::cuStreamEndCapture(device.stream, &mut graph), "ending a capture");
            if let Err(e) = done.and(ended) {
                if !graph.is_null() {
                    sys::cuGraphDestroy(graph);
                }
                return Err(e);
            }
            let mut exec = null_mut();
            let made = check(sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0), "making a graph");
            sys::cuGraphDestroy(graph);
            made?;
            Ok(Replay { device: device.clone(), exec })
        }
    }

    pub fn launch(&self) -> Result<()> {
        // SAFETY: instantiated above.
        check(unsafe { sys::cuGraphLaunch(self.exec, self.device.stream) }, "replaying a step")
    }
}

impl Drop for Replay {
    fn drop(&mut self) {
        // SAFETY: instantiated by `capture`; the driver keeps what a running launch needs.
        unsafe { sys::cuGraphExecDestroy(self.exec) };
    }
}
