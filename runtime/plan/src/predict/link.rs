//! Predicts the time of collectives from the links of a machine: inside a host, and between hosts.

use super::calibration::Calibration;
use crate::route::Route;
use perilune_core::Mesh;
use perilune_core::error::{Error, Result};
use perilune_core::mesh::Axis;

/// GPUs of one host that NVLink joins.
pub const GPUS_OF_A_HOST: usize = 8;

const MB: f64 = 1e6;

/// The devices of a mesh on hosts. Ranks fill one host after the other, so that the inner axes stay inside a host.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    pub rates: Calibration,
    pub mesh: Mesh,
    /// Devices of each host.
    pub of_a_host: usize,
    /// How the devices of a host exchange tensors: that of the program.
    pub route: Route,
}

/// What the devices along an axis send through.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Link {
    /// NVLink, inside a host.
    Host,
    /// PCIe, through the memory of the host.
    HostMemory,
    /// The network: so many devices of each host take part, each with a network card.
    Network { of_a_host: usize },
}

impl Link {
    pub fn name(self) -> &'static str {
        match self {
            Link::Host => "NVLink",
            Link::HostMemory => "host memory",
            Link::Network { .. } => "network",
        }
    }
}

impl Machine {
    /// Spreads a mesh evenly over `hosts`, or over as few as hold it.
    pub fn new(rates: Calibration, mesh: Mesh, hosts: Option<usize>) -> Result<Machine> {
        let devices = mesh.devices();
        let hosts = hosts.unwrap_or(devices.div_ceil(GPUS_OF_A_HOST));
        if hosts == 0 || !devices.is_multiple_of(hosts) {
            let message = format!("{devices} devices cannot be spread evenly over {hosts} hosts");
            return Err(
                Error::argument("predict", message).hint("--hosts takes a number that divides that of the devices")
            );
        }
        let of_a_host = devices / hosts;
        if of_a_host > GPUS_OF_A_HOST {
            let message = format!("{of_a_host} devices on each of {hosts} hosts; a host has {GPUS_OF_A_HOST}");
            return Err(Error::argument("predict", message)
                .hint(format!("--hosts {} or more", devices.div_ceil(GPUS_OF_A_HOST))));
        }
        Ok(Machine { rates, mesh, of_a_host, route: Route::Links })
    }

    pub fn hosts(&self) -> usize {
        self.mesh.devices() / self.of_a_host
    }

    /// The link along an axis.
    pub fn link(&self, axis: Axis) -> Link {
        let inner = Axis::ALL.into_iter().skip_while(|a| *a != axis).skip(1);
        let stride: usize = inner.map(|a| self.mesh.size(a)).product();
        let n = self.mesh.size(axis);
        match stride * n <= self.of_a_host && self.of_a_host.is_multiple_of(stride * n) {
            true if self.route == Route::HostMemory => Link::HostMemory,
            true => Link::Host,
            false => Link::Network { of_a_host: (self.of_a_host / stride).clamp(1, n) },
        }
    }

    /// The seconds of a collective of `bytes`, those of the whole tensor, along an axis.
    pub fn collective(&self, op: &str, axis: Axis, bytes: usize) -> f64 {
        let (n, link) = (self.mesh.size(axis) as f64, self.link(axis));
        if n < 2.0 || bytes == 0 {
            return 0.0;
        }
        // From stage to stage two devices take part, each with its own network card.
        let is_pair = op == "send";
        let n = if is_pair { 2.0 } else { n };
        let rate = |quantity: &str, at: f64| self.rates.at(quantity, at).unwrap_or(1.0);
        let alpha = rate("alpha", n) * 1e-6;
        let alpha = match link {
            Link::Host => alpha,
            Link::HostMemory => {
                // A device reads all that the others have copied.
                let factor = if op == "collective_permute" { 1.0 } else { n - 1.0 };
                let seconds =
                    alpha + rate("host_alpha", 1.0) * 1e-6 + factor * bytes as f64 / (rate("host", 1.0) * 1e9);
                return seconds.max(Machine { route: Route::Links, ..*self }.collective(op, axis, bytes));
            }
            Link::Network { .. } => alpha + rate("nic_alpha", 1.0) * 1e-6,
        };
        // A device sends all that it has to one other, at the rate at which slices go to all.
        let (op, factor) = match op {
            "collective_permute" | "send" => ("all_to_all", 1.0),
            "all_reduce" => (op, 2.0 * (n - 1.0) / n),
            _ => (op, (n - 1.0) / n),
        };
        let bus = |mb: f64| {
            let host = rate(&format!("bus_{op}"), mb) * rate(&format!("growth_{op}"), n);
            match link {
                Link::Host | Link::HostMemory => host,
                Link::Network { .. } if is_pair => host.min(rate("nic", 1.0)),
                Link::Network { of_a_host } => host.min(rate("nic", 1.0) * of_a_host as f64),
            }
        };
        let time = |mb: f64| factor * mb * MB / (bus(mb) * 1e9);
        let mb = bytes as f64 / MB;
        let first = self.rates.first(&format!("bus_{op}")).unwrap_or(1.0);
        if mb >= first {
            return time(mb).max(alpha);
        }
        // Below the first measured size: from the latency to the time of that size.
        let most = time(first).max(alpha);
        alpha + (most - alpha) * mb / first
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(mesh: &str, hosts: Option<usize>) -> Machine {
        Machine::new(Calibration::of("h200").unwrap(), Mesh::parse(mesh).unwrap(), hosts).unwrap()
    }

    #[test]
    fn inner_axes_stay_in_a_host() {
        let m = machine("dp=4,tp=8", None);
        assert_eq!((m.hosts(), m.link(Axis::Tp), m.link(Axis::Dp)), (4, Link::Host, Link::Network { of_a_host: 1 }));
        let m = machine("dp=16", None);
        assert_eq!(m.link(Axis::Dp), Link::Network { of_a_host: 8 });
        assert_eq!(machine("dp=4,tp=2", None).link(Axis::Dp), Link::Host);
        assert_eq!(machine("dp=4,tp=2", Some(4)).link(Axis::Dp), Link::Network { of_a_host: 1 });
        assert_eq!(machine("dp=2,tp=4", Some(4)).link(Axis::Tp), Link::Network { of_a_host: 2 });
    }

    #[test]
    fn measured_buses_are_met() {
        let m = machine("dp=2", None);
        for (op, mb, bus, factor) in
            [("all_reduce", 16, 212.0, 1.0), ("all_reduce", 1024, 327.0, 1.0), ("all_gather", 128, 228.0, 0.5)]
        {
            let seconds = m.collective(op, Axis::Dp, mb * 1_000_000);
            assert!((factor * mb as f64 * 1e6 / seconds / 1e9 - bus).abs() < 1e-6, "{op} {mb}: {seconds}");
        }
        let eight = machine("dp=8", None);
        let bus = 1.75 * 1.024 / eight.collective("all_reduce", Axis::Dp, 1_024_000_000);
        assert!((bus - 358.0).abs() < 1.0, "{bus}");
    }

    #[test]
    fn host_memory_takes_longer_than_links() {
        let links = machine("dp=2", None);
        let host = Machine { route: Route::HostMemory, ..links };
        assert_eq!((host.link(Axis::Dp), host.link(Axis::Dp).name()), (Link::HostMemory, "host memory"));
        assert_eq!(Machine { route: Route::HostMemory, ..machine("dp=16", None) }.link(Axis::Dp).name(), "network");
        for bytes in [4, 1 << 20, 1 << 28] {
            let of = |m: &Machine| m.collective("collective_permute", Axis::Dp, bytes);
            assert!(of(&host) >= of(&links), "{bytes}");
        }
        let seconds = host.collective("collective_permute", Axis::Dp, 450_000_000);
        assert!((seconds - 0.01).abs() < 1e-4, "{seconds}");
    }

    #[test]
    fn more_bytes_devices_and_hosts_take_longer() {
        for op in ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"] {
            let mut last = 0.0;
            for k in 6..36 {
                let now = machine("dp=8", None).collective(op, Axis::Dp, 1 << k);
                assert!(now >= last, "{op}: {} bytes take {now}, half of them {last}", 1u64 << k);
                last = now;
            }
            let bytes = 200_000_000;
            let near = machine("dp=8", None).collective(op, Axis::Dp, bytes);
            let far = machine("dp=8", Some(8)).collective(op, Axis::Dp, bytes);
            assert!(far > 2.0 * near, "{op}: {near} in a host, {far} between hosts");
        }
        assert_eq!(machine("dp=8", None).collective("all_reduce", Axis::Tp, 1 << 20), 0.0);
        let slices = machine("cp=2", None).collective("all_to_all", Axis::Cp, 1 << 30);
        assert!(machine("cp=2", None).collective("collective_permute", Axis::Cp, 1 << 30) > 1.9 * slices);
        // A transfer between two stages does not depend on how many there are, but on the network.
        let sent = |mesh: &str, hosts| machine(mesh, hosts).collective("send", Axis::Pp, 1 << 30);
        assert_eq!(sent("pp=2", None), sent("pp=8", None));
        assert_eq!(sent("pp=2", Some(2)), sent("pp=16", Some(2)));
        let network = sent("pp=2", Some(2));
        assert!((network - (1u64 << 30) as f64 / 45e9).abs() < 1e-6 && network > sent("pp=2", None), "{network}");
    }

    #[test]
    fn hosts_have_to_fit() {
        let of =
            |mesh: &str, hosts| Machine::new(Calibration::of("h200").unwrap(), Mesh::parse(mesh).unwrap(), Some(hosts));
        assert_eq!(of("dp=16", 3).unwrap_err().message, "16 devices cannot be spread evenly over 3 hosts");
        let e = of("dp=16", 1).unwrap_err();
        assert_eq!(
            (e.message.as_str(), e.hint.as_deref()),
            ("16 devices on each of 1 hosts; a host has 8", Some("--hosts 2 or more"))
        );
        assert!(of("dp=16", 0).is_err());
    }
}
