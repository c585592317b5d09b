//! Opens a GPU: its primary context, its properties and the stream in which all its work runs.

use super::{Context, Handle, PeerAccess, Snapshots, check, sys};
use crate::dylib;
use crate::guard::Guard;
use crate::launch::Props;
use perilune_core::error::{Error, Result};
use std::ffi::CStr;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// One GPU with a stream in which all work runs in order. (Small results use a second stream: `copy_streams`.)
pub struct Device {
    pub ordinal: usize,
    pub name: String,
    pub props: Props,
    pub total_bytes: usize,
    pub(crate) stream: Handle<sys::CUstream_st>,
    pub(super) device: sys::CUdevice,
    /// The CUDA version of the driver, such as 13000 for CUDA 13.0.
    pub driver_version: i32,
    /// Snapshots for checkpoints, which separate threads transfer.
    pub snapshots: Arc<Snapshots>,
    pub(super) context: Arc<Context>,
    /// The mapped memory, and which GPUs may access it.
    pub(super) peer_access: PeerAccess,
    /// Bytes of its memory in which other devices put messages for it.
    pub(super) landing_bytes: AtomicU64,
}

impl Device {
    /// The number of GPUs that this process may open.
    pub fn count() -> Result<usize> {
        dylib::load("CUDA driver")?;
        let mut count = 0;
        // SAFETY: the library is loaded; the out-pointer is to a local.
        unsafe {
            check(sys::cuInit(0), "starting the CUDA driver")?;
            check(sys::cuDeviceGetCount(&mut count), "counting GPUs")?;
        }
        Ok(count as usize)
    }

    /// Opens a GPU. `guard`: what the kernels of recipes are made to do.
    pub fn open(ordinal: usize, guard: Guard) -> Result<Arc<Device>> {
        let count = Device::count()?;
        // SAFETY: the library is loaded; out-pointers are to locals.
        unsafe {
            if ordinal >= count {
                let message = format!("there is no device cuda:{ordinal}: {count} found");
                return Err(Error::system("cuda", message).hint("perilune doctor lists devices; they count from 0"));
            }
            let mut device = 0;
            check(sys::cuDeviceGet(&mut device, ordinal as i32), "opening the GPU")?;
            let context = Arc::new(Context::retain(device)?);
            context.bind()?;
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
                guard,
            };
            Ok(Arc::new(Device {
                ordinal,
                name,
                props,
                total_bytes,
                stream: Handle(stream),
                device,
                driver_version,
                snapshots: Arc::default(),
                context,
                peer_access: PeerAccess::default(),
                landing_bytes: AtomicU64::new(0),
            }))
        }
    }

    /// Makes the device's context current on this thread, for the calls that follow.
    pub fn bind(&self) -> Result<()> {
        self.context.bind()
    }

    /// The PCI address of the GPU, such as `00000000:1B:00.0`.
    pub fn pci_address(&self) -> Option<String> {
        let mut text = [0i8; 32];
        // SAFETY: the buffer has the length that is passed.
        let status = unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), text.len() as i32, self.device) };
        let bytes: Vec<u8> = text.iter().take_while(|c| **c != 0).map(|c| *c as u8).collect();
        String::from_utf8(bytes).ok().filter(|t| status as i32 == 0 && !t.is_empty())
    }

    /// The maximum clock of the SMs, in Hz.
    pub fn clock_hz(&self) -> Option<f64> {
        let mut khz = 0;
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE;
        // SAFETY: the out-pointer is to a local.
        let status = unsafe { sys::cuDeviceGetAttribute(&mut khz, attribute, self.device) };
        (status as i32 == 0 && khz > 0).then(|| f64::from(khz) * 1e3)
    }

    /// Bytes of its memory in which other devices put messages for it.
    pub fn landing_bytes(&self) -> usize {
        self.landing_bytes.load(Ordering::Relaxed) as usize
    }

    /// Free bytes of device memory.
    pub fn free_bytes(&self) -> usize {
        let (mut free, mut total) = (0, 0);
        // SAFETY: out-pointers are to locals.
        unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) };
        free
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if self.bind().is_err() {
            return;
        }
        // SAFETY: the stream is this device's own, and everything that used it holds an `Arc` of it.
        unsafe {
            sys::cuStreamSynchronize(self.stream.0);
            sys::cuStreamDestroy_v2(self.stream.0);
        }
    }
}
