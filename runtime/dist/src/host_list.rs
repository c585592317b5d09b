//! Parses Slurm's compressed lists of hosts and of task counts.

/// The first host of a list such as `gpu[03-07,12],login1`, or the rule that the text breaks.
pub fn first(list: &str) -> Result<String, String> {
    let mut depth = 0;
    let end = list.find(|c| {
        match c {
            '[' => depth += 1,
            ']' => depth -= 1,
            _ => {}
        }
        c == ',' && depth == 0
    });
    let mut rest = &list[..end.unwrap_or(list.len())];
    let mut host = String::new();
    while let Some((before, after)) = rest.split_once('[') {
        let (ranges, after) = after.split_once(']').ok_or("a bracket is not closed")?;
        host.push_str(before);
        host.push_str(first_number(ranges)?);
        rest = after;
    }
    host.push_str(rest);
    let plain = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    match host.is_empty() || !host.chars().all(plain) {
        true => Err("not a list of hosts such as gpu[03-07,12]".into()),
        false => Ok(host),
    }
}

/// The first number of `03-07,12`, with its leading zeros.
fn first_number(ranges: &str) -> Result<&str, String> {
    let mut first = None;
    for range in ranges.split(',') {
        let (from, to) = range.split_once('-').unwrap_or((range, range));
        match (from.parse::<u64>(), to.parse::<u64>()) {
            (Ok(a), Ok(b)) if a <= b => first = first.or(Some(from)),
            _ => return Err(format!("\"{range}\" is not a range of numbers such as 03-07")),
        }
    }
    first.ok_or_else(|| "a bracket is empty".into())
}

/// The number of tasks on a node, of a list such as `4(x2),3`, or the rule that the text breaks.
pub fn tasks(list: &str, node: usize) -> Result<usize, String> {
    let malformed = |part: &str| format!("\"{part}\" is not a number of tasks such as 4 or 4(x2)");
    let mut nodes = 0usize;
    for part in list.split(',') {
        let (count, times) = match part.split_once("(x") {
            Some((count, times)) => (count, times.strip_suffix(')').ok_or_else(|| malformed(part))?),
            None => (part, "1"),
        };
        let (Ok(count), Ok(times)) = (count.parse::<usize>(), times.parse::<usize>()) else {
            return Err(malformed(part));
        };
        nodes = nodes.saturating_add(times);
        if node < nodes {
            return Ok(count);
        }
    }
    Err(format!("a list for {nodes} nodes, and SLURM_NODEID={node}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_host_of_a_list() {
        for (list, host) in [
            ("node1", "node1"),
            ("node1,node2", "node1"),
            ("gpu[03-07,12],login1", "gpu03"),
            ("gpu[7]", "gpu7"),
            ("rack[1-2]n[001-064].cluster", "rack1n001.cluster"),
            ("a-[2,4-5]-ib,b", "a-2-ib"),
        ] {
            assert_eq!(first(list).as_deref(), Ok(host), "{list}");
        }
        for list in ["", ",a", "a[", "a[]", "a[1-]", "a[x-y]", "a[3-1]", "a]1[", "a[1][", "a b", "a[1-2,]", "a[[1]]"] {
            assert!(first(list).is_err(), "{list}: {:?}", first(list));
        }
    }

    #[test]
    fn tasks_of_a_node() {
        let all: Vec<_> = (0..5).map(|node| tasks("4(x2),3,1(x2)", node).unwrap()).collect();
        assert_eq!(all, [4, 4, 3, 1, 1]);
        assert_eq!(tasks("8", 0), Ok(8));
        for list in ["", "x", "4(x", "4(x2", "4(2)", "4,", "-1"] {
            assert!(tasks(list, 1).is_err(), "{list}");
        }
        assert_eq!(tasks("2(x2)", 2).unwrap_err(), "a list for 2 nodes, and SLURM_NODEID=2");
    }
}
