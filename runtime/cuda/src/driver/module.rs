//! Loads machine code, launches its kernels and encodes tensor maps for TMA.

use super::{Address, Device, Handle, Lane, check, sys};
use crate::launch::TmaDesc;
use perilune_core::DType;
use perilune_core::error::{Error, Result};
use std::ffi::{CStr, CString, c_void};
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

/// The beginning of PTX, as `guard` prints it.
const PTX: &[u8] = b".version ";

/// Lowers the version of PTX to that of an older driver, which knows the instructions of a guarded kernel too; it refuses others.
fn for_driver(text: &[u8], driver: i32) -> Vec<u8> {
    let line = text.iter().position(|b| *b == b'\n').unwrap_or(0);
    let version = std::str::from_utf8(&text[PTX.len().min(line)..line]).ok().and_then(|v| v.trim().parse::<f64>().ok());
    // CUDA 12.n has PTX 8.n up to 12.5; 12.6 has 8.5, and later ones count on.
    let known = match (driver / 1000, driver % 1000 / 10) {
        (12, minor @ ..=5) => 8.0 + f64::from(minor) / 10.0,
        (12, minor) => 8.0 + f64::from(minor - 1) / 10.0,
        (13, minor) => 9.0 + f64::from(minor) / 10.0,
        _ => f64::MAX,
    };
    let mut out = match version {
        Some(version) if version > known => [format!(".version {known:.1}").as_bytes(), &text[line..]].concat(),
        _ => text.to_vec(),
    };
    out.push(0);
    out
}

impl Module {
    /// Loads a CUBIN, or PTX that ends in a 0.
    pub fn load(device: &Arc<Device>, code: &[u8]) -> Result<Arc<Module>> {
        if code.starts_with(PTX) {
            return Module::assemble(device, code);
        }
        let mut module = null_mut();
        // SAFETY: the image is a complete CUBIN: NVRTC generated it, and the cache checks its hash.
        check(unsafe { sys::cuModuleLoadData(&mut module, code.as_ptr().cast()) }, "loading a kernel")?;
        Ok(Arc::new(Module { device: device.clone(), module: Handle(module) }))
    }

    /// Lets the driver assemble PTX.
    fn assemble(device: &Arc<Device>, text: &[u8]) -> Result<Arc<Module>> {
        use sys::CUjit_option::{CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
        let text = for_driver(text, device.driver_version);
        let mut module = null_mut();
        let mut log = vec![0u8; 4 << 10];
        let mut options = [CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        let mut values = [log.as_mut_ptr().cast::<c_void>(), log.len() as *mut c_void];
        // SAFETY: the text ends in a 0 (`for_driver`); the log has the length that is passed, and outlives the call.
        let status = unsafe {
            let (options, values) = (options.as_mut_ptr(), values.as_mut_ptr());
            sys::cuModuleLoadDataEx(&mut module, text.as_ptr().cast(), 2, options, values)
        };
        if let Err(e) = check(status, "assembling a kernel of the recipe") {
            let log =
                CStr::from_bytes_until_nul(&log).map(|s| s.to_string_lossy().trim().to_string()).unwrap_or_default();
            let hint = "the driver's assembler, libnvidia-ptxjitcompiler, comes with the driver: update both, or run without limits of kernels";
            return Err(Error::system("cuda", format!("{}\n{log}", e.message).trim_end().to_string()).hint(hint));
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_driver_gets_an_older_version() {
        let text = b".version 9.0\n.target sm_90a\n";
        let first = |driver| String::from_utf8(for_driver(text, driver)[..12].to_vec()).unwrap();
        for (driver, version) in [(13000, "9.0"), (13020, "9.0"), (12080, "8.7"), (12060, "8.5"), (12040, "8.4")] {
            assert_eq!(first(driver), format!(".version {version}"));
        }
    }
}
