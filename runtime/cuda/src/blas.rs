//! Calls cuBLASLt for matrix products.
//!
//! cuBLASLt is column-major and Perilune row-major: a row-major C = A B is the column-major C' = B' A' over the same
//! memory, so the operands are swapped instead of copied. Sums are in f32 for f32 and 16-bit floats (TF32 only on
//! request) and in f64 for f64. Split-K partial sums are added in the compute type, in a fixed order.

mod problem;

pub use problem::{Problem, Product, product};

use crate::autotune::{Table, Trial};
use crate::driver::{Address, Device, outside_captures};
use crate::dylib;
use cudarc::cublaslt::sys;
use perilune_core::DType;
use perilune_core::error::{Error, Result};
use perilune_core::ops::fp8::Format;
use problem::Side;
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

/// Bytes of workspace for products, as NVIDIA recommends for Hopper.
pub const WORKSPACE: usize = 64 << 20;
/// Maximum number of algorithms that are timed.
const CANDIDATES: usize = 8;
/// The alignment in bytes of fp8 operands and of their rows.
pub const ALIGNMENT: u32 = 16;

/// cuBLASLt on one device.
pub struct Blas {
    pub(crate) device: Arc<Device>,
    handle: sys::cublasLtHandle_t,
    workspace: Address,
    /// Algorithms found by timing, stored for later processes.
    found: Table,
    /// Algorithms chosen in this process.
    chosen: HashMap<Choice, sys::cublasLtMatmulAlgo_t>,
}

// SAFETY: cuBLASLt's handle belongs to no thread; the backend's lock holds its calls apart.
unsafe impl Send for Blas {}

/// Everything that the choice of an algorithm depends on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Choice {
    problem: Problem,
    tf32: bool,
    epilogue: Epilogue,
    bias_align: u32,
    /// Whether there was memory for timing algorithms.
    tried: bool,
}

fn check(status: sys::cublasStatus_t, what: &str) -> Result<()> {
    if status as u32 == 0 {
        return Ok(());
    }
    Err(Error::system("cuda", format!("{what} failed (cuBLAS error {})", status as u32)))
}

impl Blas {
    /// Initialises cuBLASLt. `workspace` has [`WORKSPACE`] bytes.
    pub fn new(device: &Arc<Device>, workspace: Address) -> Result<Blas> {
        dylib::load("cuBLASLt")?;
        let mut handle = null_mut();
        // SAFETY: the library is loaded and the device's context is current.
        check(unsafe { sys::cublasLtCreate(&mut handle) }, "starting cuBLASLt")?;
        // SAFETY: as above; the function has no arguments.
        let version = unsafe { sys::cublasLtGetVersion() };
        let machine = format!("{} {} {version} {WORKSPACE}", device.name, device.driver_version);
        let found = Table {
            folder: crate::nvrtc::folder().map(|f| f.with_file_name("products")),
            shared: perilune_core::cache_folder::shared_cache().map(|dir| dir.join("products")),
            machine,
        };
        Ok(Blas { device: device.clone(), handle, workspace, found, chosen: HashMap::new() })
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: made by `new`.
            outside_captures(|| unsafe { sys::cublasLtDestroy(self.handle) });
        }
    }
}

/// Operations applied to the sum before it is stored.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Epilogue {
    /// Adds a vector of N elements to each row.
    pub bias: bool,
    /// Adds a matrix with the shape of the result.
    pub residual: bool,
    /// Whether the sums must equal those of the plain product bit for bit, which requires the plain product's
    /// algorithm. Otherwise the first algorithm offered for the product with its bias is used.
    pub plain_sums: bool,
}

/// A product ready to run.
pub struct Gemm {
    desc: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    pub(crate) algo: sys::cublasLtMatmulAlgo_t,
    pub(crate) dtype: DType,
    fp8: bool,
    epilogue: Epilogue,
}

// SAFETY: descriptions are host memory of their own, which one thread at a time uses: the type is not `Sync`.
unsafe impl Send for Gemm {}

/// The operands of a call.
#[derive(Clone, Copy, Debug)]
pub struct Addresses {
    pub a: Address,
    pub b: Address,
    pub out: Address,
    pub bias: Address,
    pub residual: Address,
    /// The f32 scales of fp8 operands A and B.
    pub scales: [Address; 2],
}

fn data_type(dtype: DType) -> sys::cudaDataType_t {
    match dtype {
        DType::F64 => sys::cudaDataType_t::CUDA_R_64F,
        DType::BF16 => sys::cudaDataType_t::CUDA_R_16BF,
        DType::F16 => sys::cudaDataType_t::CUDA_R_16F,
        _ => sys::cudaDataType_t::CUDA_R_32F,
    }
}

fn byte_type(format: Format) -> sys::cudaDataType_t {
    match format {
        Format::E4M3 => sys::cudaDataType_t::CUDA_R_8F_E4M3,
        Format::E5M2 => sys::cudaDataType_t::CUDA_R_8F_E5M2,
    }
}

impl Blas {
    /// Picks an algorithm: the first one that cuBLASLt offers or, with a trial, the one that the search finds
    /// (`autotune`). The addresses of a bias are multiples of `bias_align`.
    pub fn gemm(
        &mut self,
        p: &Problem,
        tf32: bool,
        epilogue: Epilogue,
        bias_align: u32,
        trial: Option<&Trial>,
    ) -> Result<Gemm> {
        let double = p.dtype == DType::F64;
        let compute = match (double, tf32 && p.dtype == DType::F32) {
            (true, _) => sys::cublasComputeType_t::CUBLAS_COMPUTE_64F,
            (_, true) => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
            _ => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
        };
        let scale = if double { sys::cudaDataType_t::CUDA_R_64F } else { sys::cudaDataType_t::CUDA_R_32F };
        use sys::cublasLtMatmulDescAttributes_t::*;
        // SAFETY: out-pointers point to locals; attributes are passed with their sizes; `Gemm` destroys the objects
        // created here.
        unsafe {
            let mut desc = null_mut();
            check(sys::cublasLtMatmulDescCreate(&mut desc, compute, scale), "describing a product")?;
            let set = |attribute, value: u64, size: usize| {
                let status =
                    sys::cublasLtMatmulDescSetAttribute(desc, attribute, (&raw const value).cast::<c_void>(), size);
                check(status, "describing a product")
            };
            set(CUBLASLT_MATMUL_DESC_TRANSA, u64::from(p.b.transposed), 4)?;
            set(CUBLASLT_MATMUL_DESC_TRANSB, u64::from(p.a.transposed), 4)?;
            let layout =
                |rows: usize, cols: usize, s: Side, of: sys::cudaDataType_t| -> Result<sys::cublasLtMatrixLayout_t> {
                    let (rows, cols) = if s.transposed { (cols, rows) } else { (rows, cols) };
                    let mut out = null_mut();
                    let status = sys::cublasLtMatrixLayoutCreate(&mut out, of, rows as u64, cols as u64, s.ld);
                    check(status, "describing a matrix")?;
                    use sys::cublasLtMatrixLayoutAttribute_t::*;
                    let count = i32::try_from(p.batch).map_err(|_| {
                        let message =
                            format!("{} products are more than the 2^31 - 1 that cuBLAS takes at once", p.batch);
                        Error::argument("matmul", message).hint("split the batch")
                    })?;
                    let attribute = |a, v: *const c_void, size| {
                        check(sys::cublasLtMatrixLayoutSetAttribute(out, a, v, size), "describing a matrix")
                    };
                    attribute(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, (&raw const count).cast(), 4)?;
                    attribute(
                        CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                        (&raw const s.batch_stride).cast::<c_void>(),
                        8,
                    )?;
                    Ok(out)
                };
            let result = Side { transposed: false, ld: p.n as i64, batch_stride: (p.m * p.n) as i64 };
            let wide = data_type(p.dtype);
            let [type_a, type_b] = p.fp8.map_or([wide; 2], |f| f.formats.map(byte_type));
            let layouts =
                [layout(p.n, p.k, p.b, type_b)?, layout(p.k, p.m, p.a, type_a)?, layout(p.n, p.m, result, wide)?];
            if let Some(f) = p.fp8 {
                set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, u64::from(f.fast), 1)?;
                set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, wide as u64, 4)?;
                // A placeholder, as for the bias: `run` sets the actual address.
                set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, self.workspace, 8)?;
                set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, self.workspace, 8)?;
            }
            let bias = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u64;
            if epilogue.bias && !epilogue.plain_sums {
                set(CUBLASLT_MATMUL_DESC_EPILOGUE, bias, 4)?;
                // The algorithm is chosen for any address; `run` sets the actual one.
                set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, self.workspace, 8)?;
            }
            let algo = sys::cublasLtMatmulAlgo_t { data: [0; 8] };
            let mut gemm = Gemm { desc, layouts, algo, dtype: p.dtype, fp8: p.fp8.is_some(), epilogue };
            let choice = Choice { problem: *p, tf32, epilogue, bias_align, tried: trial.is_some() };
            let known = self.chosen.get(&choice).copied();
            match known {
                Some(algo) => gemm.algo = algo,
                None => {
                    self.choose(&mut gemm, &choice, trial)?;
                    self.chosen.insert(choice, gemm.algo);
                }
            }
            if epilogue.bias && epilogue.plain_sums {
                set(CUBLASLT_MATMUL_DESC_EPILOGUE, bias, 4)?;
                let status = sys::cublasLtMatmulAlgoCheck(
                    self.handle,
                    desc,
                    layouts[0],
                    layouts[1],
                    layouts[2],
                    layouts[2],
                    &gemm.algo,
                    &mut std::mem::zeroed(),
                );
                check(status, "adding a bias in the product")?;
            }
            Ok(gemm)
        }
    }

    /// Queries cuBLASLt for algorithms and, with a trial, times them. Queries are slow for fp8 products, so the answer
    /// is cached (`chosen`): the layers of a model share few kinds of products.
    fn choose(&self, gemm: &mut Gemm, choice: &Choice, trial: Option<&Trial>) -> Result<()> {
        use sys::cublasLtMatmulPreferenceAttributes_t::*;
        let Choice { problem: p, tf32, epilogue, bias_align, .. } = choice;
        let [a, b, out] = gemm.layouts;
        // SAFETY: as in `gemm`; the preference is destroyed below.
        unsafe {
            let mut preference = null_mut();
            check(sys::cublasLtMatmulPreferenceCreate(&mut preference), "choosing an algorithm")?;
            let prefer = |attribute, value: u64, size: usize| {
                let value = (&raw const value).cast::<c_void>();
                sys::cublasLtMatmulPreferenceSetAttribute(preference, attribute, value, size);
            };
            prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, WORKSPACE as u64, 8);
            // Reduce in the compute type, in a fixed order.
            prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, 2, 4);
            prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, u64::from(p.align.1), 4);
            prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, u64::from(p.align.0), 4);
            let out_align = 1u64 << (p.m * p.n * p.dtype.size()).trailing_zeros().min(8);
            prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, out_align, 4);
            // It also limits the bias, which has no preference of its own.
            let bias_align = if epilogue.bias { u64::from(*bias_align) } else { 256 };
            prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out_align.min(bias_align), 4);
            let mut found: [sys::cublasLtMatmulHeuristicResult_t; CANDIDATES] = std::mem::zeroed();
            let mut count = 0;
            let status = sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                gemm.desc,
                a,
                b,
                out,
                out,
                preference,
                CANDIDATES as i32,
                found.as_mut_ptr(),
                &mut count,
            );
            sys::cublasLtMatmulPreferenceDestroy(preference);
            check(status, "choosing an algorithm")?;
            if count == 0 {
                return Err(Error::system("cuda", format!("cuBLASLt has no algorithm for {p:?}")));
            }
            let found: Vec<_> = found[..count as usize].iter().map(|f| f.algo).collect();
            gemm.algo = found[0];
            let Some(trial) = trial.filter(|_| count > 1) else { return Ok(()) };
            let key = self.found.key(&format!("{p:?} {tf32} {epilogue:?} {} {:?}", choice.bias_align, trial.search));
            match self.found.get(&key).filter(|algo| self.takes(gemm, algo)) {
                Some(algo) => gemm.algo = algo,
                // If the search fails (a driver too old for timing), the first algorithm stays.
                None if trial.pick(self, gemm, &found).is_ok() => self.found.put(&key, &gemm.algo),
                None => gemm.algo = found[0],
            }
            Ok(())
        }
    }

    /// Whether cuBLASLt accepts an algorithm from disk for this product.
    fn takes(&self, gemm: &Gemm, algo: &sys::cublasLtMatmulAlgo_t) -> bool {
        let [a, b, out] = gemm.layouts;
        // SAFETY: the descriptors are alive; the result is a local that is only written.
        unsafe {
            let mut result: sys::cublasLtMatmulHeuristicResult_t = std::mem::zeroed();
            let status = sys::cublasLtMatmulAlgoCheck(self.handle, gemm.desc, a, b, out, out, algo, &mut result);
            status as u32 == 0 && result.workspaceSize <= WORKSPACE
        }
    }

    /// Queues a call.
    pub fn run(&self, gemm: &Gemm, at: Addresses) -> Result<()> {
        let (one, zero) = (1.0f32, 0.0f32);
        let (one64, zero64) = (1.0f64, 0.0f64);
        let double = gemm.dtype == DType::F64;
        let number =
            |x: &f32, y: &f64| if double { std::ptr::from_ref(y).cast() } else { std::ptr::from_ref(x).cast() };
        let alpha: *const c_void = number(&one, &one64);
        let beta: *const c_void = if gemm.epilogue.residual { alpha } else { number(&zero, &zero64) };
        let c = if gemm.epilogue.residual { at.residual } else { at.out };
        // SAFETY: the addresses hold matrices of the described shapes (`product` bounds them by the views that the
        // planner checked); the workspace has its size; alpha and beta are read before the call returns.
        unsafe {
            if gemm.epilogue.bias {
                let attribute = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
                let status = sys::cublasLtMatmulDescSetAttribute(gemm.desc, attribute, (&raw const at.bias).cast(), 8);
                check(status, "naming a bias")?;
            }
            if gemm.fp8 {
                use sys::cublasLtMatmulDescAttributes_t::*;
                // The operands are swapped.
                let [of_b, of_a] = [CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER];
                for (attribute, address) in [(of_a, &at.scales[0]), (of_b, &at.scales[1])] {
                    let address = std::ptr::from_ref(address).cast();
                    let status = sys::cublasLtMatmulDescSetAttribute(gemm.desc, attribute, address, 8);
                    check(status, "naming a scale")?;
                }
            }
            let status = sys::cublasLtMatmul(
                self.handle,
                gemm.desc,
                alpha,
                at.b as *const c_void,
                gemm.layouts[0],
                at.a as *const c_void,
                gemm.layouts[1],
                beta,
                c as *const c_void,
                gemm.layouts[2],
                at.out as *mut c_void,
                gemm.layouts[2],
                &gemm.algo,
                self.workspace as *mut c_void,
                WORKSPACE,
                self.device.stream.0.cast(),
            );
            check(status, "a matrix product")
        }
    }
}

impl Drop for Gemm {
    fn drop(&mut self) {
        // SAFETY: created by `Blas::gemm`.
        unsafe {
            sys::cublasLtMatmulDescDestroy(self.desc);
            for l in self.layouts {
                sys::cublasLtMatrixLayoutDestroy(l);
            }
        }
    }
}
