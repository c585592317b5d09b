//! Loads machine code, launches its kernels and encodes tensor maps for TMA.

use super::{Address, Device, Handle, Lane, check, sys};
use crate::launch::TmaDesc;
use perilune_core::DType;
use perilune_core::error::{Error, Result};
use std::ffi::{CString, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

/// Loaded machine code.
pub struct Module {
    device: Arc<Device>,
    module: Handle<sys::CUmod_st>,
}

/// A function of a module, valid as long as the module.
#[derive(Clone)]
pub struct Entry {
    _module: Arc<Module>,
    function: Handle<sys::CUfunc_st>,
}

impl Module {
    pub fn load(device: &Arc<Device>, cubin: &[u8]) -> Result<Arc<Module>> {
        let mut module = null_mut();
        // SAFETY: the image is a complete CUBIN: NVRTC generated it, and the cache checks its hash.
        check(unsafe { sys::cuModuleLoadData(&mut module, cubin.as_ptr().cast()) }, "loading a kernel")?;
        Ok(Arc::new(Module { device: device.clone(), module: Handle(module) }))
    }

    pub fn entry(self: &Arc<Module>, name: &str) -> Result<Entry> {
        let text = CString::new(name).map_err(|_| Error::system("cuda", "this is a bug: a kernel's name holds a 0"))?;
        let mut function = null_mut();
        // SAFETY: the module is loaded; the name ends in 0.
        let status = unsafe { sys::cuModuleGetFunction(&mut function, self.module.0, text.as_ptr()) };
        check(status, &format!("finding the kernel {name}"))?;
        Ok(Entry { _module: self.clone(), function: Handle(function) })
    }
}

impl Entry {
    /// Allows a block to use that much dynamic shared memory.
    pub fn allow_shared(&self, nbytes: u32) -> Result<()> {
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is loaded.
        let status = unsafe { sys::cuFuncSetAttribute(self.function.0, attribute, nbytes as i32) };
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
        self.launch_in(device.stream, grid, block, shared, args)
    }

    /// Queues a launch on a lane of the device.
    pub fn launch_on(&self, lane: &Lane, grid: [u32; 3], block: [u32; 3], args: &mut [*mut c_void]) -> Result<()> {
        self.launch_in(lane.stream, grid, block, 0, args)
    }

    fn launch_in(
        &self,
        stream: Handle<sys::CUstream_st>,
        grid: [u32; 3],
        block: [u32; 3],
        shared: u32,
        args: &mut [*mut c_void],
    ) -> Result<()> {
        // SAFETY: `args` point to as many values as the kernel has parameters, with their sizes (the code that built
        // the launch also wrote the kernel's text); the driver copies them before it returns.
        let status = unsafe {
            sys::cuLaunchKernel(
                self.function.0,
                grid[0],
                grid[1],
                grid[2],
                block[0],
                block[1],
                block[2],
                shared,
                stream.0,
                args.as_mut_ptr(),
                null_mut(),
            )
        };
        check(status, "launching a kernel")
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: entries hold the module; queued launches are over or finish first (the driver waits).
            unsafe { sys::cuModuleUnload(self.module.0) };
        }
    }
}

/// The description of a tensor that a kernel passes to the copy engine (TMA).
pub struct TensorMap(sys::CUtensorMap);

impl TensorMap {
    pub fn new(address: Address, boxes: &TmaDesc) -> Result<TensorMap> {
        let dtype = match boxes.dtype {
            DType::BF16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            DType::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            other => return Err(Error::system("cuda", format!("this is a bug: a tensor map over {other}"))),
        };
        // SAFETY: a plain C structure; the driver fills it in from the arrays, which have one element per dim.
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

    /// The pointer for `Entry::launch`, valid as long as the map.
    pub fn pointer(&self) -> *mut c_void {
        std::ptr::from_ref(&self.0).cast_mut().cast()
    }
}
