//! Reads a GPU's utilization, memory, power, temperature and throttle reasons from NVML.
//!
//! The library comes with the driver and is opened at run time; without it there are no readings. A probe may run on a
//! separate thread, because a reading takes from microseconds to milliseconds and a step must not wait for it. NVML
//! ignores CUDA_VISIBLE_DEVICES, so the GPU is found by its PCI address.

use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};
use perilune_plan::{Probe, Readings};
use std::ffi::OsStr;

/// Drivers without the development package install only the second name.
const NAMES: [&str; 2] = ["libnvidia-ml.so", "libnvidia-ml.so.1"];

/// Returns a probe of the GPU at that PCI address (`00000000:1B:00.0`), or `None` if NVML is absent or does not list
/// it.
pub fn probe(pci: &str) -> Option<Probe> {
    let nvml = NAMES.iter().find_map(|name| Nvml::builder().lib_path(OsStr::new(name)).init().ok())?;
    nvml.device_by_pci_bus_id(pci).ok()?;
    let pci = pci.to_string();
    Some(Box::new(move || read(&nvml, &pci)))
}

fn read(nvml: &Nvml, pci: &str) -> Option<Readings> {
    let gpu = nvml.device_by_pci_bus_id(pci).ok()?;
    let use_of = gpu.utilization_rates().ok();
    let memory = gpu.memory_info().ok();
    let watts = |milli: u32| f64::from(milli) / 1e3;
    Some(Readings {
        utilization: use_of.as_ref().map(|u| f64::from(u.gpu)),
        memory_used: memory.as_ref().map(|m| m.used as f64),
        memory_total: memory.as_ref().map(|m| m.total as f64),
        power: gpu.power_usage().ok().map(watts),
        power_limit: gpu.enforced_power_limit().ok().map(watts),
        temperature: gpu.temperature(TemperatureSensor::Gpu).ok().map(f64::from),
        clock_mhz: gpu.clock_info(Clock::SM).ok().map(f64::from),
        throttled: gpu.current_throttle_reasons().map(reasons).unwrap_or_default(),
    })
}

/// The reasons for throttled clocks, except an idle GPU and user-set clocks.
fn reasons(r: ThrottleReasons) -> Vec<&'static str> {
    let known = [
        (ThrottleReasons::SW_POWER_CAP, "power limit"),
        (ThrottleReasons::HW_SLOWDOWN, "hardware slowdown"),
        (ThrottleReasons::SW_THERMAL_SLOWDOWN, "temperature"),
        (ThrottleReasons::HW_THERMAL_SLOWDOWN, "temperature (hardware)"),
        (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, "power brake"),
    ];
    known.iter().filter(|(bit, _)| r.contains(*bit)).map(|(_, name)| *name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_the_library_or_the_gpu_there_is_no_probe() {
        assert!(probe("ffff:ff:1f.7").is_none());
    }

    #[test]
    fn only_what_slows_a_gpu_down_is_a_reason() {
        assert!(reasons(ThrottleReasons::GPU_IDLE | ThrottleReasons::NONE).is_empty());
        assert_eq!(reasons(ThrottleReasons::SW_POWER_CAP | ThrottleReasons::GPU_IDLE), ["power limit"]);
    }
}
