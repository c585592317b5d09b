//! Parses `check --for`: a GPU that is not in this machine, by its name or its memory.

use perilune_core::Mesh;
use perilune_core::byte_size::{amount, show};
use perilune_core::error::did_you_mean;
use perilune_cuda::OfflineTarget;
use perilune_cuda::launch::Props;
use perilune_dist::MeshOptions;
use perilune_lua::{OpenMesh, OpenedMesh};
use perilune_plan::{Backend, estimate::Estimate};
use std::rc::Rc;
use std::sync::Arc;

/// Memory that the driver's context and the libraries' workspaces take beside the buffers.
pub const OVERHEAD: usize = 512 << 20;

/// A GPU with its memory in MiB, as the driver reports it.
struct Gpu {
    name: &'static str,
    props: Props,
    mib: usize,
}

const fn gpu(name: &'static str, mib: usize, arch: (u32, u32), sms: u32, shared_kib: u32) -> Gpu {
    Gpu { name, mib, props: Props { arch, sms, shared_bytes: shared_kib << 10, ..Props::H200 } }
}

const GPUS: [Gpu; 9] = [
    gpu("b200", 183_359, (10, 0), 148, 227),
    gpu("h200", 143_771, (9, 0), 132, 227),
    gpu("h100", 81_559, (9, 0), 132, 227),
    gpu("a100", 81_920, (8, 0), 108, 163),
    gpu("a100-40gb", 40_960, (8, 0), 108, 163),
    gpu("l40s", 46_068, (8, 9), 142, 99),
    gpu("l4", 23_034, (8, 9), 58, 99),
    gpu("rtx4090", 24_564, (8, 9), 128, 99),
    gpu("rtx3090", 24_576, (8, 6), 82, 99),
];

/// The device of an estimate.
#[derive(Clone, Debug)]
pub struct Target {
    /// Such as `an h200` or `a GPU of 24.0 GiB`.
    pub name: String,
    pub bytes: usize,
    /// The name in the table of rates; empty for an amount of memory.
    pub gpu: &'static str,
    props: Props,
}

impl Target {
    /// Parses a name or an amount of memory, which stands for a GPU with the kernels of an H200.
    pub fn parse(text: &str) -> Result<Target, String> {
        let lower = text.to_lowercase();
        let plain = lower.replace([' ', '_'], "").replace("rtx-", "rtx");
        if let Some(gpu) = GPUS.iter().find(|gpu| gpu.name == plain) {
            let article = if plain.starts_with(['h', 'a', 'l', 'r']) { "an" } else { "a" };
            return Ok(Target {
                name: format!("{article} {plain}"),
                bytes: gpu.mib << 20,
                gpu: gpu.name,
                props: gpu.props,
            });
        }
        if let Ok(bytes) = amount(text) {
            return Ok(Target { name: format!("a GPU of {}", show(bytes)), bytes, gpu: "", props: Props::H200 });
        }
        let names = GPUS.map(|gpu| gpu.name);
        let near = did_you_mean(&plain, names).map(|name| format!("; did you mean {name}?")).unwrap_or_default();
        Err(format!("it is neither a known GPU ({}) nor an amount of memory such as 24GiB{near}", names.join(", ")))
    }

    /// Opens a backend that plans for the GPU, or for each GPU of a mesh.
    pub fn open(&self, mesh: Mesh) -> Arc<dyn Backend> {
        let target = Arc::new(OfflineTarget { props: self.props, cudnn: true });
        Arc::new(Estimate::new(target, self.bytes).of_mesh(mesh))
    }

    /// Returns what opens the mesh that a recipe asks for, of such GPUs.
    pub fn opener(self) -> OpenMesh {
        Rc::new(move |text, now| {
            let options = MeshOptions::parse(text)?;
            let backend = (options.mesh != now).then(|| self.open(options.mesh));
            Ok(OpenedMesh { backend, options })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_have_names_or_sizes() {
        let of = |text| Target::parse(text).map(|t| (t.name, t.bytes));
        assert_eq!(of("H200"), Ok(("an h200".into(), 143_771 << 20)));
        assert_eq!(of("RTX 4090"), Ok(("an rtx4090".into(), 24_564 << 20)));
        assert_eq!(of("24GiB"), Ok(("a GPU of 24.0 GiB".into(), 24 << 30)));
        assert!(of("h20").is_err_and(|e| e.contains("did you mean h200?") && e.contains("24GiB")));
    }
}
