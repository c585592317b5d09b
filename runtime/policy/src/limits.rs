//! States how much memory a recipe may use.

/// Limits of a recipe, in bytes; `None` is no limit. They are numbers only: the layers above keep to them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// What the Lua state may allocate: strings, tables, closures. By default a quarter of the machine's memory.
    pub lua_bytes: Option<u64>,
    /// What one compressed file may expand to. By default a quarter of the machine's memory.
    pub expansion_bytes: Option<u64>,
}

impl Limits {
    /// No limit at all.
    pub const NONE: Limits = Limits { lua_bytes: None, expansion_bytes: None };
}

/// Where the machine does not say how much memory it has.
const UNKNOWN: u64 = 16 << 30;

impl Default for Limits {
    fn default() -> Limits {
        let share = machine_memory().unwrap_or(UNKNOWN) / 4;
        Limits { lua_bytes: Some(share), expansion_bytes: Some(share) }
    }
}

/// The machine's memory in bytes, or that of the container if it has less.
fn machine_memory() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = meminfo.lines().find_map(|l| l.strip_prefix("MemTotal:"))?;
    let machine = line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.saturating_mul(1024);
    let container = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let limits = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
    Some(limits.into_iter().filter_map(container).filter(|n| *n > 0).fold(machine, u64::min))
}

#[cfg(test)]
mod tests {
    use super::Limits;

    #[test]
    fn by_default_there_is_a_limit_below_the_memory_of_any_machine() {
        let limits = Limits::default();
        for bytes in [limits.lua_bytes, limits.expansion_bytes] {
            assert!(bytes.is_some_and(|n| (1 << 20..1 << 46).contains(&n)), "{limits:?}");
        }
    }
}
