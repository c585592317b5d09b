use super::*;

/// Finds the place from variables written as `NAME=value NAME=value`.
fn place_with(explicit: &Explicit, text: &str) -> Result<Place> {
    let get = |name: &str| {
        let mut all = text.split_whitespace().filter_map(|pair| pair.split_once('='));
        all.find(|(key, _)| *key == name).map(|(_, value)| value.replace('~', " "))
    };
    find(explicit, &get)
}

fn place(text: &str) -> Result<Place> {
    place_with(&Explicit::default(), text)
}

/// Rank, processes, local rank, local processes, address.
type Short = (usize, usize, usize, usize, String);

fn short(place: &Place) -> Short {
    let address = place.address.as_ref().map(|a| a.to_string()).unwrap_or_default();
    (place.rank, place.processes, place.local_rank, place.local_processes, address)
}

const TORCHRUN: &str =
    "RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 MASTER_ADDR=node1 MASTER_PORT=29400";
const SLURM: &str = "SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_STEP_NODELIST=gpu[03-04] \
                     SLURM_STEP_TASKS_PER_NODE=4(x2) SLURM_JOB_ID=77 SLURM_STEP_ID=0 SLURM_JOB_NAME=train";
const OPEN_MPI: &str = "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0 \
                        OMPI_COMM_WORLD_LOCAL_SIZE=2 MASTER_ADDR=a MASTER_PORT=1234";
const PMI: &str = "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2";
const PET: &str = "PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=8 PET_MASTER_ADDR=job-0.svc PET_MASTER_PORT=29600";
const KUBERNETES: &str = "JOB_COMPLETION_INDEX=1 WORLD_SIZE=2 MASTER_ADDR=job-0.job";

#[test]
fn every_launcher_is_recognised() {
    let slurm_port = job_port("slurm 77.0");
    let gpu03 = format!("gpu03:{slurm_port}");
    for (text, source, expected) in [
        ("", Source::Alone, (0, 1, 0, 1, "")),
        ("WORLD_SIZE=1", Source::Alone, (0, 1, 0, 1, "")),
        (TORCHRUN, Source::Torchrun, (3, 8, 1, 2, "node1:29400")),
        ("RANK=0 WORLD_SIZE=1", Source::Torchrun, (0, 1, 0, 1, "")),
        ("RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=5", Source::Torchrun, (1, 2, 0, 1, "a:5")),
        ("RANK=1 WORLD_SIZE=2 MASTER_ADDR=fd00::1 MASTER_PORT=5", Source::Torchrun, (1, 2, 0, 1, "[fd00::1]:5")),
        (PET, Source::Pet, (1, 2, 0, 1, "job-0.svc:29600")),
        ("PET_NNODES=1 PET_NPROC_PER_NODE=gpu", Source::Pet, (0, 1, 0, 1, "")),
        (SLURM, Source::Slurm, (5, 8, 1, 4, gpu03.as_str())),
        (OPEN_MPI, Source::OpenMpi, (2, 4, 0, 2, "a:1234")),
        (PMI, Source::Pmi, (1, 2, 1, 2, "127.0.0.1:29500")),
        (KUBERNETES, Source::Kubernetes, (1, 2, 0, 1, "job-0.job:29500")),
        // Independent tasks of an indexed job.
        ("JOB_COMPLETION_INDEX=1", Source::Alone, (0, 1, 0, 1, "")),
    ] {
        let found = place(text).unwrap_or_else(|e| panic!("{text}: {e}"));
        let (a, b, c, d, address) = expected;
        assert_eq!((found.source, short(&found)), (source, (a, b, c, d, address.to_string())), "{text}");
    }
}

#[test]
fn the_first_kind_of_variables_decides() {
    let all = [TORCHRUN, PET, SLURM, OPEN_MPI, PMI, KUBERNETES];
    let sources = [Source::Torchrun, Source::Pet, Source::Slurm, Source::OpenMpi, Source::Pmi, Source::Kubernetes];
    for (k, source) in sources.into_iter().enumerate() {
        // PMI and OpenMPI variables that disagree with a Slurm step are those of an mpirun inside it.
        let rest: Vec<&str> =
            all[k..].iter().copied().filter(|t| source != Source::Slurm || [SLURM, KUBERNETES].contains(t)).collect();
        assert_eq!(place(&rest.join(" ")).unwrap().source, source);
    }
    assert_eq!(place(&[SLURM, OPEN_MPI].join(" ")).unwrap().source, Source::OpenMpi);
    let same = "PMI_RANK=5 PMI_SIZE=8";
    assert_eq!(place(&[SLURM, same].join(" ")).unwrap().source, Source::Slurm);
}

#[test]
fn flags_beat_variables() {
    let explicit = Explicit { rank: Some(1), processes: Some(2), address: Some("b:7".into()), ..Explicit::default() };
    let found = place_with(&explicit, TORCHRUN).unwrap();
    assert_eq!((found.source, short(&found)), (Source::Flags, (1, 2, 0, 1, "b:7".to_string())));
    // The address alone, and the local ranks alone, change what the variables say.
    let only = Explicit { address: Some("[fd00::2]:7".into()), ..Explicit::default() };
    let found = place_with(&only, TORCHRUN).unwrap();
    assert_eq!((found.source, short(&found)), (Source::Torchrun, (3, 8, 1, 2, "[fd00::2]:7".to_string())));
    let local = Explicit { local_rank: Some(3), local_processes: Some(4), ..Explicit::default() };
    assert_eq!(short(&place_with(&local, TORCHRUN).unwrap()), (3, 8, 3, 4, "node1:29400".to_string()));
}

#[test]
fn details_of_launchers() {
    // The agent of torchrun holds the port.
    for (value, port) in [("True", 29401), ("1", 29401), ("False", 29400)] {
        let found = place(&format!("{TORCHRUN} TORCHELASTIC_USE_AGENT_STORE={value}")).unwrap();
        assert_eq!(found.address.unwrap().port, port, "{value}");
    }
    let found = place(&format!("{TORCHRUN} TORCHELASTIC_RESTART_COUNT=2 TORCHELASTIC_RUN_ID=r7")).unwrap();
    assert_eq!((found.attempt, found.job.as_str()), (2, "r7"));
    let text = "rank 3 of 8, 1 of 2 on this host, from torchrun variables (RANK, WORLD_SIZE); rank 0 listens on node1:29400; restart 2";
    assert_eq!(found.to_string(), text);
    // Slurm: an interactive shell, the script of sbatch, one node, MASTER_ADDR.
    for name in ["bash", "interactive"] {
        assert_eq!(place(&SLURM.replace("=train", &format!("={name}"))).unwrap(), Place::alone());
    }
    assert_eq!(place(&SLURM.replace("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")).unwrap(), Place::alone());
    let one = SLURM.replace("gpu[03-04]", "gpu03").replace("4(x2)", "8").replace("NODEID=1", "NODEID=0");
    assert_eq!(place(&one).unwrap().address.unwrap().host, "127.0.0.1");
    assert_eq!(place(&format!("{SLURM} MASTER_ADDR=h MASTER_PORT=9")).unwrap().address.unwrap().to_string(), "h:9");
    assert_eq!(place(&format!("{SLURM} SLURM_RESTART_COUNT=3")).unwrap().attempt, 3);
    // Steps of one job, and jobs, have different ports.
    let port = |text: &str| place(text).unwrap().address.unwrap().port;
    assert_ne!(port(SLURM), port(&SLURM.replace("STEP_ID=0", "STEP_ID=1")));
    assert!((20000..30000).contains(&port(SLURM)));
    assert_eq!(nodes(&|name| (name == "PET_NNODES").then(|| "1".into())).unwrap().unwrap().processes, None);
}

#[test]
fn errors_name_the_variable_its_value_the_rule_and_the_cure() {
    let cases = [
        ("RANK=x WORLD_SIZE=2", "RANK=x: not a whole number", "set RANK to such a number"),
        ("RANK=-1 WORLD_SIZE=2", "RANK=-1: not a whole number", ""),
        ("RANK=+1 WORLD_SIZE=2", "RANK=+1: not a whole number", ""),
        ("RANK=99999999999999999999 WORLD_SIZE=2", "RANK=99999999999999999999: not a whole number", ""),
        ("RANK=1", "RANK=1: WORLD_SIZE is not set", "set WORLD_SIZE as well, or unset RANK"),
        ("WORLD_SIZE=4", "WORLD_SIZE=4: RANK is not set", "set RANK as well"),
        ("RANK=4 WORLD_SIZE=4 MASTER_ADDR=a", "RANK=4: not less than WORLD_SIZE=4", "from 0 to 3"),
        ("RANK=0 WORLD_SIZE=0", "WORLD_SIZE=0: there is at least 1 process", "set WORLD_SIZE"),
        ("RANK=1 WORLD_SIZE=2", "WORLD_SIZE=2: several processes need MASTER_ADDR", "torchrun"),
        ("RANK=1 WORLD_SIZE=2 MASTER_ADDR=a~b", "MASTER_ADDR=a b: not the name or address", "set MASTER_ADDR"),
        ("RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=0", "MASTER_PORT=0: not a port", "free port"),
        ("RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=65536", "MASTER_PORT=65536: not a port", ""),
        ("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 MASTER_ADDR=a", "LOCAL_RANK=1: LOCAL_WORLD_SIZE is not set", "as well"),
        ("RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=a", "LOCAL_WORLD_SIZE=2: LOCAL_RANK is not set", ""),
        (
            "RANK=1 WORLD_SIZE=2 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=a",
            "LOCAL_RANK=2: not less than LOCAL_WORLD_SIZE=2",
            "",
        ),
        (
            "RANK=1 WORLD_SIZE=2 LOCAL_RANK=2 LOCAL_WORLD_SIZE=4 MASTER_ADDR=a",
            "LOCAL_WORLD_SIZE=4: more processes on this host than WORLD_SIZE=2",
            "one host",
        ),
        (
            "RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=65535 TORCHELASTIC_USE_AGENT_STORE=True",
            "MASTER_PORT=65535: torchrun's agent",
            "--master-port",
        ),
        ("PET_NNODES=1:4", "PET_NNODES=1:4: a range", "one number"),
        ("PET_NNODES=2", "PET_NNODES=2: PET_NODE_RANK is not set", ""),
        ("PET_NNODES=2 PET_NODE_RANK=2", "PET_NODE_RANK=2: not less than PET_NNODES=2", "from 0 to 1"),
        ("PET_NNODES=2 PET_NODE_RANK=1", "PET_NNODES=2: PET_MASTER_ADDR is not set", ""),
        ("PET_NNODES=1 PET_NPROC_PER_NODE=many", "PET_NPROC_PER_NODE=many: not a whole number", ""),
        ("PET_NNODES=1 PET_NPROC_PER_NODE=0", "PET_NPROC_PER_NODE=0: there is at least 1", "gpu"),
        ("SLURM_PROCID=0 SLURM_STEP_NODELIST=a", "SLURM_PROCID=0: SLURM_NTASKS is not set", ""),
        ("JOB_COMPLETION_INDEX=2 WORLD_SIZE=2 MASTER_ADDR=a", "JOB_COMPLETION_INDEX=2: not less than WORLD_SIZE=2", ""),
        ("JOB_COMPLETION_INDEX=0 WORLD_SIZE=2", "WORLD_SIZE=2: several processes need MASTER_ADDR", "headless"),
        ("PMI_RANK=1 PMI_SIZE=2", "PMI_RANK=1: MPI_LOCALRANKID is not set", ""),
    ];
    for (text, message, cure) in cases {
        let e = place(text).map(|p| p.to_string()).expect_err(text);
        let hint = e.hint.unwrap_or_default();
        assert!(e.message.starts_with(message), "{text}: {}", e.message);
        assert!(!hint.is_empty() && hint.contains(cure), "{text}: {hint}");
    }
    for (from, to, message) in [
        ("gpu[03-04]", "gpu[03-", "SLURM_STEP_NODELIST=gpu[03-: a bracket is not closed"),
        ("4(x2)", "4(x1)", "SLURM_STEP_TASKS_PER_NODE=4(x1): a list for 1 nodes, and SLURM_NODEID=1"),
        ("LOCALID=1", "LOCALID=4", "SLURM_LOCALID=4: not less than SLURM_STEP_TASKS_PER_NODE=4"),
        ("PROCID=5", "PROCID=8", "SLURM_PROCID=8: not less than SLURM_NTASKS=8"),
    ] {
        let e = place(&SLURM.replace(from, to)).unwrap_err();
        assert!(e.message.starts_with(message), "{}", e.message);
    }
    let apart = OPEN_MPI.replace("MASTER_ADDR=a", "");
    let e = place(&apart).unwrap_err();
    assert_eq!(e.hint.unwrap(), "start it with mpirun -x MASTER_ADDR=HOST …");
    for (explicit, message) in [
        (Explicit { rank: Some(1), ..Explicit::default() }, "--rank=1: --world-size is not given"),
        (Explicit { processes: Some(2), ..Explicit::default() }, "--world-size=2: --rank is not given"),
        (
            Explicit { rank: Some(1), processes: Some(2), ..Explicit::default() },
            "--world-size=2: several processes need",
        ),
        (Explicit { local_rank: Some(1), ..Explicit::default() }, "--local-rank=1: --local-world-size is not given"),
        (
            Explicit { rank: Some(1), processes: Some(2), address: Some("b".into()), ..Explicit::default() },
            "--master=b: not an address HOST:PORT",
        ),
        (
            Explicit { rank: Some(2), processes: Some(2), address: Some("b:1".into()), ..Explicit::default() },
            "--rank=2: not less than --world-size=2",
        ),
    ] {
        let e = place_with(&explicit, "").unwrap_err();
        assert!(e.message.starts_with(message), "{}", e.message);
    }
}

/// Any combination of odd values gives a place whose numbers fit each other, or an error.
#[test]
fn no_values_break_the_rules_of_a_place() {
    let names = [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "PET_NNODES",
        "PET_NODE_RANK",
        "PET_NPROC_PER_NODE",
        "PET_MASTER_ADDR",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_LOCALID",
        "SLURM_NODEID",
        "SLURM_STEP_NODELIST",
        "SLURM_STEP_TASKS_PER_NODE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        "JOB_COMPLETION_INDEX",
        "TORCHELASTIC_USE_AGENT_STORE",
    ];
    let values =
        ["", "0", "1", "2", "3", "x", "-1", "a[1-2],b", "2(x2)", "65535", "True", "é", "1e3", "18446744073709551616"];
    let mut state = 7u64;
    let mut below = |n: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % n
    };
    let (mut places, mut errors) = (0, 0);
    for _ in 0..20_000 {
        let mut all = std::collections::HashMap::new();
        for _ in 0..below(9) {
            all.insert(names[below(names.len())], values[below(values.len())].to_string());
        }
        match find(&Explicit::default(), &|name| all.get(name).cloned()) {
            Ok(p) => {
                assert!(p.rank < p.processes && p.local_rank < p.local_processes && p.local_processes <= p.processes);
                assert_eq!(p.address.is_some(), p.processes > 1, "{all:?}");
                places += 1;
            }
            Err(e) => {
                assert!(e.hint.is_some(), "{e}");
                errors += 1;
            }
        }
    }
    assert!(places > 1000 && errors > 1000, "{places} {errors}");
}
