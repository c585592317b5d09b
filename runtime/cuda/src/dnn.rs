//! Runs convolutions through cuDNN's graph API. cuDNN is optional: without it convolutions are decomposed.
//!
//! Backend descriptors are created, filled attribute by attribute and finalized. A problem becomes a graph of one
//! operation. cuDNN lists engine configurations for it, ordered by its heuristics, and the first one that is
//! deterministic and accumulates in f32 is used. A problem therefore has the same bits in every run with one version of
//! cuDNN on one kind of GPU. Constants come from cudarc. Functions are loaded here, because cudarc panics on a missing
//! symbol.

use crate::conv::{Kind, Problem};
use crate::driver::{Address, Device, outside_captures};
use crate::dylib;
use cudarc::cudnn::sys::cudnnBackendAttributeName_t::{self as Attribute, *};
use cudarc::cudnn::sys::cudnnBackendAttributeType_t::{self as AttributeType, *};
use cudarc::cudnn::sys::cudnnBackendDescriptorType_t::{self as DescriptorType, *};
use cudarc::cudnn::sys::cudnnBackendHeurMode_t::{self as HeurMode, *};
use cudarc::cudnn::sys::cudnnBackendNumericalNote_t::{self as Note, *};
use cudarc::cudnn::sys::{cudnnConvolutionMode_t as ConvMode, cudnnDataType_t as DataType};
use perilune_core::DType;
use perilune_core::error::{Error, Result};
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};

/// Maximum scratch bytes of a convolution.
const MOST_WORKSPACE: usize = 1 << 30;
/// Maximum number of configurations requested from cuDNN.
const MOST_CONFIGS: usize = 64;
/// Alignment of tensor addresses in bytes.
pub const ALIGNMENT: i64 = 16;

type Handle = *mut c_void;
type Descriptor = *mut c_void;

dylib::functions! {
    "cuDNN", "cuDNN 9 is needed",
    version: fn() -> usize = b"cudnnGetVersion\0",
    error: fn(c_int) -> *const c_char = b"cudnnGetErrorString\0",
    create: fn(*mut Handle) -> c_int = b"cudnnCreate\0",
    destroy: fn(Handle) -> c_int = b"cudnnDestroy\0",
    set_stream: fn(Handle, *mut c_void) -> c_int = b"cudnnSetStream\0",
    make: fn(c_int, *mut Descriptor) -> c_int = b"cudnnBackendCreateDescriptor\0",
    unmake: fn(Descriptor) -> c_int = b"cudnnBackendDestroyDescriptor\0",
    finalize: fn(Descriptor) -> c_int = b"cudnnBackendFinalize\0",
    set: fn(Descriptor, c_int, c_int, i64, *const c_void) -> c_int = b"cudnnBackendSetAttribute\0",
    get: fn(Descriptor, c_int, c_int, i64, *mut i64, *mut c_void) -> c_int = b"cudnnBackendGetAttribute\0",
    execute: fn(Handle, Descriptor, Descriptor) -> c_int = b"cudnnBackendExecute\0",
}

/// Heuristic modes in order of preference: the decision tree, then the fallback.
const MODES: [HeurMode; 2] = [CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK];
/// Engines with these notes are rejected: sums in reduced precision, nondeterministic ones, Winograd transforms.
const REFUSED: [Note; 6] = [
    CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION,
    CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC,
    CUDNN_NUMERICAL_NOTE_WINOGRAD,
    CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_4x4,
    CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_6x6,
    CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_13x13,
];

/// cuDNN on one device.
pub struct Dnn {
    api: Arc<Api>,
    handle: Handle,
    device: Arc<Device>,
    /// Answers of `adds`.
    adds: Mutex<HashMap<(Kind, DType), bool>>,
}

// SAFETY: cuDNN's handle belongs to no thread; the backend's lock holds its calls apart.
unsafe impl Send for Dnn {}

/// A descriptor, destroyed on drop.
struct Desc {
    api: Arc<Api>,
    raw: Descriptor,
}

// SAFETY: a descriptor is host memory that belongs to no thread. It is written until it is finalized, by the thread that makes it, and
// only read afterwards.
unsafe impl Send for Desc {}
// SAFETY: as above.
unsafe impl Sync for Desc {}

impl Drop for Desc {
    fn drop(&mut self) {
        // SAFETY: created by `Dnn::make`.
        unsafe { (self.api.unmake)(self.raw) };
    }
}

/// An execution plan for a problem.
pub struct Plan {
    desc: Desc,
    pub workspace: usize,
    /// The engine's number, for messages.
    pub engine: i64,
    /// The descriptors that the plan was built from.
    _parts: Arc<Vec<Desc>>,
}

/// The addresses of x, w, y (or their gradients) and of scratch.
#[derive(Clone, Copy, Debug)]
pub struct Addresses {
    pub x: Address,
    pub w: Address,
    pub y: Address,
    pub scratch: Address,
}

/// Why configurations were rejected, for the error if none is left.
#[derive(Default, Debug)]
pub struct Refusals {
    /// Nondeterministic, or with sums below f32.
    inexact: usize,
    /// Exceeds the scratch limit.
    large: usize,
    failures: usize,
    /// The first error, including cuDNN's status.
    first: Option<String>,
}

impl Refusals {
    /// Counts an error and returns no candidates.
    fn failed<T>(&mut self, what: &str, e: Error) -> Vec<T> {
        self.failures += 1;
        self.first.get_or_insert_with(|| format!("{what}: {}", e.message));
        Vec::new()
    }
}

impl std::fmt::Display for Refusals {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{} inexact, {} with too much workspace, {} failed", self.inexact, self.large, self.failures)?;
        self.first.as_ref().map_or(Ok(()), |first| write!(f, ", first {first}"))
    }
}

/// The notice for a cuDNN that is installed but fails to start: its status and the consequence for the run.
pub fn left_out(e: &Error) -> String {
    let hint = e.hint.as_ref().map(|h| format!(" ({h})")).unwrap_or_default();
    format!(
        "cuDNN is not used: {}{hint}. 16-bit convolutions are unfolded and multiplied instead, which is slower",
        e.message
    )
}

impl Api {
    fn check(&self, status: c_int, what: &str) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: returns a static string for any number.
        let text = unsafe { CStr::from_ptr((self.error)(status)) }.to_string_lossy().into_owned();
        Err(Error::system("cuda", format!("{what} failed: {text} (cuDNN error {status})")))
    }
}

impl Dnn {
    pub fn new(device: &Arc<Device>) -> Result<Dnn> {
        let api = Arc::new(Api::load()?);
        let mut handle = null_mut();
        // SAFETY: the device's context is current; the out-pointer points to a local.
        unsafe {
            api.check((api.create)(&mut handle), "starting cuDNN")?;
            let dnn = Dnn { api, handle, device: device.clone(), adds: Mutex::default() };
            dnn.api.check((dnn.api.set_stream)(handle, device.stream.0.cast()), "giving cuDNN a stream")?;
            Ok(dnn)
        }
    }

    /// The version, such as 91900 for cuDNN 9.19.0.
    pub fn version(&self) -> usize {
        // SAFETY: the function has no arguments.
        unsafe { (self.api.version)() }
    }

    fn make(&self, kind: DescriptorType) -> Result<Desc> {
        let mut raw = null_mut();
        // SAFETY: the out-pointer points to a local.
        self.api.check(unsafe { (self.api.make)(kind as c_int, &mut raw) }, "describing a convolution")?;
        Ok(Desc { api: self.api.clone(), raw })
    }

    fn set<T>(&self, d: &Desc, attribute: Attribute, kind: AttributeType, values: &[T]) -> Result<()> {
        // SAFETY: `values` are of the attribute's type (the constants beside each call) and are copied.
        let status = unsafe {
            (self.api.set)(
                d.raw,
                attribute as c_int,
                kind as c_int,
                values.len() as i64,
                values.as_ptr().cast::<c_void>(),
            )
        };
        self.api.check(status, "describing a convolution")
    }

    /// Reads up to `values.len()` values of an attribute; returns how many there were.
    fn get<T>(&self, d: &Desc, attribute: Attribute, kind: AttributeType, values: &mut [T]) -> Result<usize> {
        let mut count = 0i64;
        // SAFETY: there is room for the requested number of values, of the attribute's type.
        let status = unsafe {
            (self.api.get)(
                d.raw,
                attribute as c_int,
                kind as c_int,
                values.len() as i64,
                &mut count,
                values.as_mut_ptr().cast::<c_void>(),
            )
        };
        self.api.check(status, "querying a convolution")?;
        Ok((count.max(0) as usize).min(values.len()))
    }

    fn finalize(&self, d: Desc) -> Result<Desc> {
        // SAFETY: a descriptor of this library.
        self.api.check(unsafe { (self.api.finalize)(d.raw) }, "describing a convolution")?;
        Ok(d)
    }

    /// A tensor of four dims, channels last.
    fn tensor(&self, id: i64, dims: [i64; 4], dtype: DType) -> Result<Desc> {
        let d = self.make(CUDNN_BACKEND_TENSOR_DESCRIPTOR)?;
        let [_, c, h, w] = dims;
        let code = if dtype == DType::BF16 { DataType::CUDNN_DATA_BFLOAT16 } else { DataType::CUDNN_DATA_HALF };
        self.set(&d, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, &[code])?;
        self.set(&d, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, &dims)?;
        self.set(&d, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, &[c * h * w, 1, w * c, c])?;
        self.set(&d, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, &[id])?;
        self.set(&d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, &[ALIGNMENT])?;
        self.finalize(d)
    }

    /// The graph of one convolution.
    fn graph(&self, p: &Problem, parts: &mut Vec<Desc>) -> Result<Desc> {
        let conv = self.make(CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR)?;
        self.set(&conv, CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, &[DataType::CUDNN_DATA_FLOAT])?;
        self.set(
            &conv,
            CUDNN_ATTR_CONVOLUTION_CONV_MODE,
            CUDNN_TYPE_CONVOLUTION_MODE,
            &[ConvMode::CUDNN_CROSS_CORRELATION],
        )?;
        self.set(&conv, CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, CUDNN_TYPE_INT64, &[2i64])?;
        self.set(&conv, CUDNN_ATTR_CONVOLUTION_DILATIONS, CUDNN_TYPE_INT64, &p.dilation)?;
        self.set(&conv, CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, CUDNN_TYPE_INT64, &p.stride)?;
        self.set(&conv, CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, CUDNN_TYPE_INT64, &p.after)?;
        self.set(&conv, CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, CUDNN_TYPE_INT64, &p.before)?;
        let conv = self.finalize(conv)?;
        let (x, w, y) = (self.tensor(1, p.x, p.dtype)?, self.tensor(2, p.w, p.dtype)?, self.tensor(3, p.y, p.dtype)?);
        // Attributes: alpha, beta, convolution, then x, w and y.
        let (kind, [alpha, beta, how, ax, aw, ay]) = match p.kind {
            Kind::Forward => (
                CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
                [
                    CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
                    CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA,
                    CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
                    CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
                    CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
                    CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
                ],
            ),
            Kind::Input => (
                CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
                [
                    CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
                    CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA,
                    CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
                    CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
                    CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
                    CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
                ],
            ),
            Kind::Weight => (
                CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
                [
                    CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
                    CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA,
                    CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
                    CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
                    CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
                    CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
                ],
            ),
        };
        let op = self.make(kind)?;
        self.set(&op, how, CUDNN_TYPE_BACKEND_DESCRIPTOR, &[conv.raw])?;
        for (attribute, t) in [(ax, &x), (aw, &w), (ay, &y)] {
            self.set(&op, attribute, CUDNN_TYPE_BACKEND_DESCRIPTOR, &[t.raw])?;
        }
        self.set(&op, alpha, CUDNN_TYPE_FLOAT, &[1f32])?;
        self.set(&op, beta, CUDNN_TYPE_FLOAT, &[if p.adds { 1f32 } else { 0f32 }])?;
        let op = self.finalize(op)?;
        let graph = self.make(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?;
        self.set(&graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, &[self.handle])?;
        self.set(&graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, &[op.raw])?;
        parts.extend([conv, x, w, y, op]);
        self.finalize(graph)
    }

    /// The configurations that the heuristics of one mode offer, best first.
    fn configs(&self, graph: &Desc, mode: HeurMode) -> Result<Vec<Desc>> {
        let heuristic = self.make(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?;
        self.set(&heuristic, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, CUDNN_TYPE_BACKEND_DESCRIPTOR, &[graph.raw])?;
        self.set(&heuristic, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, &[mode])?;
        let heuristic = self.finalize(heuristic)?;
        let mut configs = Vec::new();
        for _ in 0..MOST_CONFIGS {
            configs.push(self.make(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR)?);
        }
        let mut raw: Vec<Descriptor> = configs.iter().map(|d| d.raw).collect();
        let count = self.get(&heuristic, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, &mut raw)?;
        configs.truncate(count);
        Ok(configs)
    }

    /// Returns the engine of a configuration, and whether it may be used.
    fn engine(&self, config: &Desc) -> Result<(i64, bool)> {
        let engine = self.make(CUDNN_BACKEND_ENGINE_DESCRIPTOR)?;
        let mut raw = [engine.raw];
        self.get(config, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, &mut raw)?;
        let mut notes = [-1i32; 32];
        let count = self.get(&engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE, &mut notes)?;
        let mut number = [-1i64];
        self.get(&engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, &mut number)?;
        Ok((number[0], !notes[..count].iter().any(|n| REFUSED.iter().any(|r| *r as i32 == *n))))
    }

    fn plan_of(&self, config: Desc, engine: i64, parts: &Arc<Vec<Desc>>) -> Result<Plan> {
        let desc = self.make(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?;
        self.set(&desc, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, &[self.handle])?;
        self.set(&desc, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, CUDNN_TYPE_BACKEND_DESCRIPTOR, &[config.raw])?;
        let desc = self.finalize(desc)?;
        let mut workspace = [0i64];
        self.get(&desc, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, &mut workspace)?;
        Ok(Plan { desc, workspace: workspace[0].max(0) as usize, engine, _parts: parts.clone() })
    }

    /// Returns up to `most` deterministic plans of a problem that sum in f32, ordered by cuDNN's preference, and why
    /// others were rejected.
    pub fn plans(&self, p: &Problem, most: usize) -> Result<(Vec<Plan>, Refusals)> {
        let mut parts = Vec::new();
        let graph = self.graph(p, &mut parts)?;
        let (mut found, mut refused) = (Vec::new(), Refusals::default());
        let modes = MODES.map(|mode| self.configs(&graph, mode));
        parts.push(graph);
        let parts = Arc::new(parts);
        for configs in modes {
            // A mode without heuristics for a problem returns an error.
            for config in configs.unwrap_or_else(|e| refused.failed("a heuristic", e)) {
                let engine = match self.engine(&config) {
                    Ok((engine, true)) => engine,
                    Ok((_, false)) => {
                        refused.inexact += 1;
                        continue;
                    }
                    Err(e) => {
                        refused.failed::<()>("an engine", e);
                        continue;
                    }
                };
                match self.plan_of(config, engine, &parts) {
                    Ok(plan) if plan.workspace <= MOST_WORKSPACE => found.push(plan),
                    Ok(_) => {
                        refused.large += 1;
                        continue;
                    }
                    Err(e) => {
                        refused.failed::<()>(&format!("engine {engine}"), e);
                        continue;
                    }
                }
                if found.len() >= most {
                    return Ok((found, refused));
                }
            }
        }
        Ok((found, refused))
    }

    /// Returns the plan to run a problem with.
    pub fn plan(&self, p: &Problem) -> Result<Plan> {
        let (mut found, refused) = self.plans(p, 1)?;
        match found.pop() {
            Some(plan) => Ok(plan),
            None => {
                let message = format!("cuDNN {} has no deterministic kernel for {p:?}: {refused}", self.version());
                Err(Error::system("conv2d", message).hint("PERILUNE_CUDNN=0 disables cuDNN"))
            }
        }
    }

    /// Whether this version adds its sums to what the result's memory holds, judged by a small problem. If it does not,
    /// convolutions with a bias are decomposed.
    pub fn adds(&self, kind: Kind, dtype: DType) -> bool {
        let mut known = self.adds.lock().unwrap_or_else(PoisonError::into_inner);
        *known.entry((kind, dtype)).or_insert_with(|| {
            let image = [1, 8, 8, 8];
            let (stride, before, after, dilation) = ([1; 2], [1; 2], [1; 2], [1; 2]);
            let w = [8, 8, 3, 3];
            let p = Problem { kind, dtype, x: image, w, y: image, stride, before, after, dilation, adds: true };
            self.plan(&p).is_ok()
        })
    }

    /// Queues a convolution.
    pub fn run(&self, plan: &Plan, at: Addresses) -> Result<()> {
        let pack = self.make(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?;
        self.set(&pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, &[1i64, 2, 3])?;
        self.set(&pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, &[at.x, at.w, at.y])?;
        self.set(&pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, &[at.scratch])?;
        let pack = self.finalize(pack)?;
        // SAFETY: the addresses hold tensors of the described shapes, and scratch has the plan's size.
        let status = unsafe { (self.api.execute)(self.handle, plan.desc.raw, pack.raw) };
        self.api.check(status, "a convolution")
    }
}

impl Drop for Dnn {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: made by `new`.
            outside_captures(|| unsafe { (self.api.destroy)(self.handle) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure() -> Error {
        Error::system("cuda", "starting cuDNN failed: CUDNN_STATUS_NOT_INITIALIZED (cuDNN error 1001)")
    }

    #[test]
    fn a_failure_names_its_status_and_what_runs_instead() {
        let text = left_out(&failure());
        for part in ["cuDNN is not used", "(cuDNN error 1001)", "unfolded and multiplied instead"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let text = left_out(&Error::system("cuda", "cuDNN lacks a function: cudnnX").hint("cuDNN 9 is needed"));
        assert!(text.contains("cuDNN lacks a function: cudnnX (cuDNN 9 is needed). 16-bit"), "{text}");
    }

    #[test]
    fn refusals_are_counted_and_the_first_failure_is_kept() {
        let mut r = Refusals { inexact: 2, ..Refusals::default() };
        let none: Vec<()> = r.failed("engine 7", failure());
        r.failed::<()>("engine 8", Error::system("cuda", "another"));
        assert!(none.is_empty());
        let want = "2 inexact, 0 with too much workspace, 2 failed, first engine 7: starting cuDNN failed: \
                    CUDNN_STATUS_NOT_INITIALIZED (cuDNN error 1001)";
        assert_eq!(r.to_string(), want);
    }
}
