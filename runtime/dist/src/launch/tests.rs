use super::*;
use crate::rendezvous::{Explicit, find, process_env};

fn shell(script: &str, processes: usize) -> Launch {
    Launch {
        program: "/bin/sh".into(),
        args: ["-c", script, "sh"].map(OsString::from).into(),
        processes,
        max_restarts: 0,
        nodes: 1,
        node_rank: 0,
        address: None,
    }
}

fn outcome(script: &str, processes: usize) -> (Outcome, f64) {
    let start = Instant::now();
    let out = launch(&shell(script, processes), |_| {}).unwrap();
    (out, start.elapsed().as_secs_f64())
}

#[test]
#[ignore = "starts processes; .ci/soak runs it"]
fn processes_get_the_variables_of_torchrun() {
    let dir = tempfile::tempdir().unwrap();
    let script = format!("env > {}/$RANK", dir.path().display());
    let (out, _) = outcome(&script, 3);
    assert_eq!(out, Outcome { status: 0, message: String::new() });
    let mut ports = Vec::new();
    for rank in 0..3 {
        let text = std::fs::read_to_string(dir.path().join(rank.to_string())).unwrap();
        let get = |name: &str| text.lines().find_map(|l| Some(l.strip_prefix(name)?.strip_prefix('=')?.to_string()));
        let place = find(&Explicit::default(), &get).unwrap();
        assert_eq!((place.rank, place.processes, place.local_rank, place.local_processes), (rank, 3, rank, 3));
        assert!(place.one_host() && place.job.starts_with("launch-"));
        ports.push(place.address.unwrap().port);
    }
    assert!(ports.iter().all(|port| *port == ports[0]));
}

#[test]
#[ignore = "starts processes; .ci/soak runs it"]
fn processes_of_several_hosts_have_ranks_in_the_order_of_hosts() {
    let dir = tempfile::tempdir().unwrap();
    let script = format!("echo $WORLD_SIZE $LOCAL_RANK $MASTER_ADDR:$MASTER_PORT > {}/$RANK", dir.path().display());
    let spec = Launch { nodes: 2, node_rank: 1, address: Address::parse("a:7"), ..shell(&script, 2) };
    assert_eq!(launch(&spec, |_| {}).unwrap().status, 0);
    let read = |rank: &str| std::fs::read_to_string(dir.path().join(rank)).unwrap();
    assert_eq!((read("2").as_str(), read("3").as_str()), ("4 0 a:7\n", "4 1 a:7\n"));
    let without = Launch { address: None, ..spec.clone() };
    assert!(launch(&without, |_| {}).unwrap_err().message.contains("--nodes 2: several hosts need --master"));
    assert!(
        launch(&Launch { node_rank: 2, ..spec }, |_| {}).unwrap_err().message.starts_with("--node-rank 2: not less")
    );
    assert!(launch(&shell("", 0), |_| {}).unwrap_err().message.starts_with("-n 0: the number of processes"));
}

#[test]
#[ignore = "starts processes; .ci/soak runs it"]
fn a_failure_ends_the_others_and_is_the_result() {
    // The others end by themselves.
    let (out, seconds) = outcome("if [ $RANK = 1 ]; then exit 3; fi; sleep 0.5; exit 1", 3);
    assert_eq!((out.status, out.message.as_str()), (3, "rank 1 ended with exit status 3"));
    assert!(seconds < 5.0);
    // They need SIGTERM.
    let (out, seconds) = outcome("if [ $RANK = 2 ]; then kill -9 $$; fi; exec sleep 60", 3);
    assert_eq!(out.status, 137);
    assert!(out.message.starts_with("rank 2 was killed by SIGKILL"), "{}", out.message);
    assert!((9.0..15.0).contains(&seconds), "{seconds}");
}

/// Takes 25 seconds.
#[test]
#[ignore = "long: processes that ignore SIGTERM"]
fn processes_that_ignore_sigterm_are_killed() {
    let (out, seconds) = outcome("if [ $RANK = 0 ]; then exit 1; fi; trap '' TERM; while :; do sleep 0.2; done", 2);
    assert_eq!(out.status, 1);
    assert!((24.0..30.0).contains(&seconds), "{seconds}");
}

#[test]
#[ignore = "starts processes; .ci/soak runs it"]
fn the_process_that_recorded_its_error_first_has_failed_first() {
    // Rank 0 ends first, because of rank 2.
    let script = r#"
        case $RANK in
          0) sleep 0.2; exit 3;;
          1) sleep 0.5; exit 3;;
          2) printf '{"message": {"message": "recipe.lua:12: \\"x\\"\\nis nil", "extraInfo": {"py_callstack": "", "timestamp": "9", "micros": "000001"}}}\n' > $TORCHELASTIC_ERROR_FILE; sleep 0.6; exit 3;;
        esac"#;
    let (out, _) = outcome(script, 3);
    let message = "rank 2 ended with exit status 3: recipe.lua:12: \"x\"\nis nil";
    assert_eq!((out.status, out.message.as_str()), (3, message));
    let file = tempfile::NamedTempFile::new().unwrap();
    let text = "recipe.lua:1: \"ä\"\n\thint: \\n";
    let path = file.path().to_str().unwrap().to_string();
    record_failure(&|name| (name == "TORCHELASTIC_ERROR_FILE").then(|| path.clone()), text);
    assert_eq!(read_error(file.path()).unwrap().1, text);
    record_failure(&|_| None, text);
}

#[test]
#[ignore = "starts processes; .ci/soak runs it"]
fn a_request_to_restart_is_passed_on_and_restarts_resume() {
    assert_eq!(outcome("exit 75", 2).0, Outcome { status: 75, message: String::new() });
    assert_eq!(outcome("exit $((75 * RANK))", 2).0.status, 75);
    let dir = tempfile::tempdir().unwrap();
    let script = format!(
        "echo \"$@\" >> {}/$RANK; if [ $TORCHELASTIC_RESTART_COUNT = 2 ]; then exit 0; fi; exit $((1 + 74 * RANK))",
        dir.path().display()
    );
    let mut spec = Launch { max_restarts: 2, ..shell(&script, 2) };
    spec.args.extend(["run", "r.lua", "--overwrite"].map(OsString::from));
    let mut notes = Vec::new();
    let out = launch(&spec, |text| notes.push(text.to_string())).unwrap();
    assert_eq!(out.status, 0);
    assert_eq!(notes[0], "restart 1 of at most 2: rank 0 ended with exit status 1");
    let seen = std::fs::read_to_string(dir.path().join("1")).unwrap();
    assert_eq!(seen, "run r.lua --overwrite\nrun r.lua --resume\nrun r.lua --resume\n");
    // Not more often than allowed, and not where it cannot help.
    assert_eq!(launch(&Launch { max_restarts: 1, ..spec }, |_| {}).unwrap().status, 1);
    let mut notes = 0;
    let spec = Launch { max_restarts: 3, ..shell("exit 3", 2) };
    assert_eq!((launch(&spec, |_| notes += 1).unwrap().status, notes), (3, 0));
}

#[test]
#[ignore = "starts processes; .ci/soak runs it"]
fn lines_of_all_processes_are_shown_once() {
    let mut lines = Lines::default();
    let shown: Vec<bool> = [(1, "a"), (2, "a"), (1, "a"), (3, "b"), (2, "a"), (2, "a"), (1, "b")]
        .map(|(rank, line)| lines.is_new(rank, line.as_bytes()))
        .into();
    assert_eq!(shown, [true, false, true, true, false, true, false]);
}

#[test]
#[ignore = "starts processes; .ci/soak runs it"]
fn a_process_without_a_launcher_depends_on_none() {
    assert!(end_with_launcher(&|_| None));
    assert!(!end_with_launcher(&|_| Some("1999999999".into())));
    // A process that a launched one has started.
    assert!(end_with_launcher(&|_| Some(std::process::id().to_string())));
    assert!(process_env(LAUNCHER).is_none() || end_with_launcher(&process_env));
}
