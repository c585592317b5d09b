//! Processes are threads here, each with its own links; `tests/processes.rs` has real ones.

use super::frame::HEADER;
use super::*;
use crate::Rank;
use crate::rendezvous::{Address, Source};
use perilune_core::mesh::Axis;
use perilune_plan::Peers;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::AtomicU16;

fn quick() -> Options {
    Options {
        join: Duration::from_secs(20),
        heartbeat: Duration::from_millis(100),
        silence: Duration::from_secs(3),
        grace: Duration::from_millis(300),
        message_limit: 256 << 20,
    }
}

/// A port of this test; nothing else of the machine is likely to use it.
fn port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let start = 10_000 + (std::process::id() % 10_000) as u16;
    loop {
        let port = start + NEXT.fetch_add(1, Ordering::Relaxed);
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

fn place(rank: usize, processes: usize, port: u16) -> Place {
    let address = Some(Address { host: "127.0.0.1".into(), port });
    Place {
        rank,
        processes,
        local_rank: rank,
        local_processes: processes,
        address,
        source: Source::Torchrun,
        ..Place::alone()
    }
}

/// Runs a function as every process of a job.
fn on_all<T: Send>(n: usize, f: impl Fn(&Links) -> T + Sync) -> Vec<T> {
    let port = port();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..n)
            .map(|rank| {
                let f = &f;
                scope.spawn(move || f(&Links::join(&place(rank, n, port), &[], quick()).unwrap()))
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

#[track_caller]
fn within<T>(seconds: f64, f: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let out = f();
    assert!(start.elapsed().as_secs_f64() < seconds, "took {:?}", start.elapsed());
    out
}

/// Without the host's name, which differs among machines.
fn anonymous(text: &str) -> String {
    let mut out = text.to_string();
    while let Some(at) = out.find(" (host ") {
        let end = at + out[at..].find(')').unwrap() + 1;
        out.replace_range(at..end, "");
    }
    out
}

fn message(result: Result<impl std::fmt::Debug>) -> String {
    anonymous(&result.unwrap_err().message)
}

/// The messages of every device in a few rounds along all axes, some of them large, and what it receives from its neighbours alone.
fn rounds(rank: &Rank, device: usize) -> Vec<Vec<Arc<[u8]>>> {
    let mut all = Vec::new();
    for (k, size) in [0usize, 1, 1000, 100_000, 3_000_000].into_iter().enumerate() {
        for axis in [Axis::Dp, Axis::Tp, Axis::Pp] {
            let bytes: Vec<u8> = (0..size + device).map(|i| (i * 31 + device * 7 + k) as u8).collect();
            all.push(rank.exchange(axis, &bytes).unwrap());
            // All axes have two devices.
            let other = 1 - rank.coordinate(axis);
            let number = (k * 10 + axis as usize) as u64;
            rank.send_to(axis, other, number, &bytes).unwrap();
            all.push(vec![rank.receive_from(axis, other, number).unwrap()]);
        }
        rank.barrier().unwrap();
    }
    all
}

fn on_devices<T: Send>(
    exchange: &Arc<Exchange>,
    run: u64,
    devices: &[usize],
    f: impl Fn(&Rank, usize) -> T + Sync,
) -> Vec<T> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = devices
            .iter()
            .map(|device| {
                let (rank, f) = (Rank::new(exchange.clone(), run, *device).of_program(5), &f);
                scope.spawn(move || f(&rank, *device))
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

#[test]
#[ignore = "connects by TCP and waits; .ci/soak runs it"]
fn exchanges_among_processes_equal_those_of_one() {
    let mesh = Mesh::parse("pp=2,dp=2,tp=2").unwrap();
    let one = Arc::new(Exchange::new(mesh));
    let expected = on_devices(&one, 1, &[0, 1, 2, 3, 4, 5, 6, 7], rounds);
    for owners in [[0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 0, 1, 2, 2, 2, 1], [3, 2, 1, 0, 0, 1, 2, 3]] {
        let n = owners.iter().max().unwrap() + 1;
        let all = on_all(n, |links| {
            let exchange = links.exchange(mesh, &owners).unwrap();
            let devices: Vec<usize> = (0..8).filter(|d| owners[*d] == links.rank()).collect();
            for run in 1..3 {
                let got = on_devices(&exchange, run, &devices, rounds);
                for (device, got) in devices.iter().zip(&got) {
                    assert!(*got == expected[*device], "{owners:?}, device {device}, run {run}");
                }
                exchange.end(run);
            }
            links.finish()
        });
        assert!(all.iter().all(Result::is_ok), "{all:?}");
    }
}

#[test]
#[ignore = "connects by TCP and waits; .ci/soak runs it"]
fn large_messages_in_both_directions_do_not_block() {
    let mesh = Mesh::parse("dp=3").unwrap();
    on_all(3, |links| {
        let exchange = links.exchange(mesh, &[0, 1, 2]).unwrap();
        let rank = Rank::new(exchange, 1, links.rank());
        for _ in 0..3 {
            let all = rank.exchange(Axis::Dp, &vec![links.rank() as u8; 20 << 20]).unwrap();
            assert!(all.iter().enumerate().all(|(k, m)| m.len() == 20 << 20 && m.iter().all(|b| *b == k as u8)));
        }
        links.finish().unwrap();
    });
}

#[test]
#[ignore = "connects by TCP and waits; .ci/soak runs it"]
fn devices_are_spread_in_blocks() {
    on_all(2, |links| {
        assert_eq!(links.spread(&Mesh::parse("dp=2,tp=2").unwrap()).unwrap(), [0, 0, 1, 1]);
        let e = links.spread(&Mesh::parse("dp=3").unwrap()).unwrap_err();
        assert_eq!(e.message, "2 processes cannot share the 3 devices of mesh dp=3 evenly");
        links.finish().unwrap();
    });
}

#[test]
#[ignore = "connects by TCP and waits; .ci/soak runs it"]
fn calls_give_every_process_the_same() {
    on_all(4, |links| {
        let rank = links.rank();
        for round in 0..20u8 {
            let own = [rank as u8, round];
            assert_eq!(*links.broadcast("the recipe", &own).unwrap(), [0, round]);
            let gathered = links.gather("their names", &own).unwrap();
            assert_eq!(gathered.is_some(), rank == 0);
            assert!(gathered.into_iter().flatten().enumerate().all(|(k, m)| *m == [k as u8, round]));
            assert_eq!(links.vote("a stop", if rank == 2 { u64::from(round) } else { 0 }).unwrap(), u64::from(round));
            links.agree("the plan", &[round], || unreachable!()).unwrap();
            let all = links.all_gather("parts", &own).unwrap();
            assert!(all.len() == 4 && all.into_iter().enumerate().all(|(k, m)| *m == [k as u8, round]));
            links.barrier("the end").unwrap();
        }
        links.finish().unwrap();
    });
}

#[test]
#[ignore = "connects by TCP and waits; .ci/soak runs it"]
fn a_process_alone_needs_no_connections() {
    let links = Links::join(&Place::alone(), &[("mesh", "dp=2".into())], quick()).unwrap();
    assert_eq!(*links.broadcast("x", b"abc").unwrap(), *b"abc");
    assert_eq!((links.vote("x", 7).unwrap(), links.gather("x", b"y").unwrap().unwrap().len()), (7, 1));
    links.agree("x", b"1", String::new).unwrap();
    assert_eq!(*links.all_gather("x", b"z").unwrap()[0], *b"z");
    let exchange = links.exchange(Mesh::parse("dp=2").unwrap(), &[0, 0]).unwrap();
    on_devices(&exchange, 1, &[0, 1], |rank, _| rank.barrier().unwrap());
    assert!(links.exchange(Mesh::parse("dp=2").unwrap(), &[0, 1]).is_err());
    links.finish().unwrap();
}

#[test]
#[ignore = "connects by TCP and waits; .ci/soak runs it"]
fn a_difference_is_said_to_all_with_both_sides() {
    let all = on_all(4, |links| {
        let rank = links.rank();
        let digest = [if rank >= 2 { 9 } else { 1 }];
        let describe = || format!("recipe.lua:9: relu\nrecipe.lua:{}: matmul\nrecipe.lua:9: relu", 10 + rank);
        let text = within(2.0, || message(links.agree("the plan of this step", &digest, describe)));
        // An edit that is refused is no failure.
        links.agree("the next plan", &[1], || unreachable!()).unwrap();
        links.finish().unwrap();
        text
    });
    let expected = "rank 0 and rank 2 do not agree on the plan of this step\n  rank 0: recipe.lua:10: matmul\n  \
                    rank 2: recipe.lua:12: matmul\n  different too: rank 3";
    assert!(all.iter().all(|text| text == expected), "{all:?}");
}

#[test]
#[ignore = "connects by TCP and waits; .ci/soak runs it"]
fn different_calls_are_a_difference() {
    let all = on_all(3, |links| {
        let text = match links.rank() {
            1 => message(links.barrier("the evaluation")),
            _ => message(links.agree("the plan", &[1], String::new)),
        };
        links.finish().unwrap();
        text
    });
    let expected = "rank 1 is about to reach the evaluation, and rank 0 to agree on the plan: they have taken different branches, \
                    or have different data";
    assert!(all.iter().all(|text| text == expected), "{all:?}");
}

#[test]
#[ignore = "connects by TCP and waits; .ci/soak runs it"]
fn the_error_of_one_process_is_that_of_all() {
    let mesh = Mesh::parse("dp=4").unwrap();
    let all = on_all(4, |links| {
        let exchange = links.exchange(mesh, &[0, 1, 2, 3]).unwrap();
        let rank = Rank::new(exchange.clone(), 1, links.rank());
        // Rank 2 may fail before the others have left the barrier.
        let _ = rank.barrier();
        match links.rank() {
            2 => {
                let cause = links.abort(3, "recipe.lua:12: attempt to index a nil value");
                (links.message(&cause), cause.status)
            }
            1 => {
                // Later runs and calls fail too.
                let first = message(rank.barrier());
                assert_eq!(message(Rank::new(exchange, 2, 1).barrier()), first);
                assert_eq!(message(links.broadcast("x", b"y")), first);
                (first, links.cause().unwrap().status)
            }
            // A consequence does not replace the cause.
            k => {
                let first = if k == 0 { message(rank.barrier()) } else { message(links.agree("x", b"y", String::new)) };
                let cause = links.abort(1, &first);
                assert_eq!(cause.rank, 2);
                assert!(links.finish().is_err());
                (anonymous(&links.message(&cause)), cause.status)
            }
        }
    });
    let text = "rank 2 ended: recipe.lua:12: attempt to index a nil value";
    for (rank, (found, status)) in all.iter().enumerate() {
        let expected = if rank == 2 { "recipe.lua:12: attempt to index a nil value" } else { text };
        assert_eq!((found.as_str(), *status), (expected, 3));
    }
}

#[test]
#[ignore = "connects by TCP and waits; .ci/soak runs it"]
fn links_that_are_dropped_fail_the_others() {
    let all = on_all(3, |links| match links.rank() {
        1 => String::new(),
        _ => message(links.barrier("x")),
    });
    assert_eq!(all[0], "rank 1 ended: it has not said why");
    assert_eq!(all[2], all[0]);
}

#[test]
#[ignore = "connects by TCP and waits; .ci/soak runs it"]
fn a_goodbye_is_no_failure_except_for_those_who_still_wait() {
    let mesh = Mesh::parse("dp=3").unwrap();
    let all = on_all(3, |links| {
        let exchange = links.exchange(mesh, &[0, 1, 2]).unwrap();
        Rank::new(exchange.clone(), 1, links.rank()).barrier().unwrap();
        if links.rank() == 1 {
            within(2.0, || links.finish().unwrap());
            return String::new();
        }
        std::thread::sleep(Duration::from_millis(600));
        assert_eq!(links.cause(), None);
        let text = message(Rank::new(exchange, 2, links.rank()).barrier());
        assert_eq!(message(links.barrier("the end")), "rank 1 has finished, but the other processes still wait for it");
        links.finish().unwrap();
        text
    });
    assert_eq!(all[0], "rank 1 has finished, but the other processes still wait for it in a step");
    assert_eq!(all[2], all[0]);
}

#[test]
#[ignore = "connects by TCP and waits; .ci/soak runs it"]
fn a_device_that_fails_fails_the_run_in_all_processes() {
    let mesh = Mesh::parse("dp=2,tp=2").unwrap();
    let all = on_all(2, |links| {
        let exchange = links.exchange(mesh, &[0, 0, 1, 1]).unwrap();
        let devices = [links.rank() * 2, links.rank() * 2 + 1];
        let first = on_devices(&exchange, 1, &devices, |rank, device| {
            if device == 3 {
                exchange.fail(1, device);
                return String::new();
            }
            let text = within(4.0, || message(rank.barrier()));
            exchange.fail(1, device);
            text
        });
        assert!(exchange.failed(1).is_some_and(|device| devices.contains(&device)));
        exchange.end(1);
        // The next run is not affected: all processes have seen the error and can handle it.
        on_devices(&exchange, 2, &devices, |rank, _| rank.barrier().unwrap());
        links.finish().unwrap();
        first
    });
    // The first device of a process to fail has the cause; the others of the process may name that one.
    assert!(all[0].contains(&"device 3 of mesh dp=2,tp=2 has failed".into()), "{:?}", all[0]);
    assert_eq!(all[1], ["device 3 of mesh dp=2,tp=2 has failed", ""]);
}

#[test]
#[ignore = "connects by TCP and waits; .ci/soak runs it"]
fn different_programs_in_one_run_are_found() {
    let mesh = Mesh::parse("dp=2").unwrap();
    let all = on_all(2, |links| {
        let exchange = links.exchange(mesh, &[0, 1]).unwrap();
        let rank = Rank::new(exchange, 7, links.rank()).of_program(10 + links.rank() as u64);
        let text = message(within(2.0, || rank.exchange(Axis::Dp, &[1])));
        links.abort(1, &text);
        text
    });
    for text in all {
        assert!(text.contains("of mesh dp=2 runs another program than the others in run 7: the processes"), "{text}");
    }
}

#[test]
#[ignore = "connects by TCP and waits; .ci/soak runs it"]
fn a_run_that_only_some_processes_make_is_found() {
    let mesh = Mesh::parse("dp=2,tp=2").unwrap();
    let all = on_all(4, |links| {
        let exchange = links.exchange(mesh, &[0, 1, 2, 3]).unwrap();
        // The last process evaluates once more, without the others.
        let run = if links.rank() == 3 { 6 } else { 5 };
        let rank = Rank::new(exchange, run, links.rank()).of_program(1);
        let result = within(3.0, || rank.exchange(Axis::Tp, &[1]).and_then(|_| rank.exchange(Axis::Dp, &[1])));
        let text = message(result);
        links.abort(1, &text);
        text
    });
    let expected = "device 3 of mesh dp=2,tp=2 is in run 6, others in run 5: the processes have taken different branches, or have \
                    different data";
    assert!(all.iter().all(|text| text.contains(expected)), "{all:?}");
}

#[test]
#[ignore = "connects by TCP and waits; .ci/soak runs it"]
fn programs_that_differ_are_found_across_groups() {
    let mesh = Mesh::parse("dp=2,tp=2").unwrap();
    let all = on_all(4, |links| {
        let exchange = links.exchange(mesh, &[0, 1, 2, 3]).unwrap();
        let odd = links.rank() % 2;
        let rank = Rank::new(exchange, 1, links.rank()).of_program(7 + odd as u64);
        let axes = if odd == 0 { [Axis::Dp, Axis::Tp] } else { [Axis::Dp, Axis::Dp] };
        let result = within(3.0, || axes.into_iter().try_for_each(|axis| rank.exchange(axis, &[1]).map(drop)));
        let text = message(result.and_then(|()| rank.barrier()));
        links.abort(1, &text);
        text
    });
    assert!(all.iter().all(|text| text.contains("runs another program than the others in run 1")), "{all:?}");
}

#[test]
#[ignore = "connects by TCP and waits; .ci/soak runs it"]
fn a_process_that_waits_for_all_while_another_runs_a_step_is_found() {
    let mesh = Mesh::parse("dp=2").unwrap();
    let all = on_all(2, |links| {
        let exchange = links.exchange(mesh, &[0, 1]).unwrap();
        within(3.0, || match links.rank() {
            0 => message(Rank::new(exchange, 1, 0).barrier()),
            _ => message(links.agree("the plan of recipe.lua:7", &[1], String::new)),
        })
    });
    let expected = "rank 1 waits for all processes to agree on the plan of recipe.lua:7, while rank 0 runs a step and waits for it: \
                    they have taken different branches, or have different data";
    assert_eq!(all[0], expected);
    assert_eq!(all[1], format!("the other processes have given up on this one: {expected}"));
}

#[test]
#[ignore = "connects by TCP and waits; .ci/soak runs it"]
fn processes_that_differ_are_refused_on_both_sides() {
    let job = |name: &str| Place { job: name.into(), ..Place::alone() };
    let of = |base: Place, rank, n, port| {
        let p = place(rank, n, port);
        Place { job: base.job, attempt: base.attempt, ..p }
    };
    for (second, terms, expected) in [
        (job(""), "dp=4", "rank 1 and rank 0 differ in the mesh: dp=4 and dp=2"),
        (job(""), "", "rank 1 and rank 0 differ in the mesh: none and dp=2"),
    ] {
        let port = port();
        let (first, other) = std::thread::scope(|scope| {
            let first =
                scope.spawn(move || Links::join(&place(0, 2, port), &[("mesh", "dp=2".into())], quick()).map(drop));
            let other = Links::join(&of(second, 1, 2, port), &[("mesh", terms.into())], quick()).map(drop);
            (message(first.join().unwrap()), message(other))
        });
        assert_eq!(first, expected);
        assert!(other.starts_with("refused by rank 0 at 127.0.0.1:") && other.contains(expected), "{other}");
        assert!(other.contains("hint: start all processes with the same release"), "{other}");
    }
    // A process of another number of processes, and two of one rank.
    for (rank, n, expected) in [
        (1, 3, "rank 1 and rank 0 differ in the number of processes: 3 and 2"),
        (0, 2, "rank 0 cannot listen on 127.0.0.1:PORT: address already in use"),
    ] {
        let port = port();
        let quick = Options { join: Duration::from_secs(1), ..quick() };
        let (first, other) = std::thread::scope(|scope| {
            let first = scope.spawn(move || Links::join(&place(0, 2, port), &[], quick).map(drop));
            std::thread::sleep(Duration::from_millis(100));
            let other = Links::join(&place(rank, n, port), &[], quick).map(drop);
            (message(first.join().unwrap()), message(other))
        });
        let expected = expected.replace("PORT", &port.to_string());
        assert!(other.contains(&expected), "{other}");
        assert!(rank == 0 || first == expected, "{first}");
    }
    // A process of another job is refused, and the job goes on.
    let port = port();
    std::thread::scope(|scope| {
        let first = scope.spawn(move || Links::join(&of(job("a"), 0, 2, port), &[], quick()).unwrap().finish());
        let other = Links::join(&of(job("b"), 1, 2, port), &[], quick()).map(drop);
        let text = message(other);
        assert!(text.contains("differ in the job: b and a"), "{text}");
        let again = Links::join(&of(job("a"), 1, 2, port), &[], quick()).unwrap().finish();
        again.unwrap();
        first.join().unwrap().unwrap();
    });
}

#[test]
#[ignore = "connects by TCP and waits; .ci/soak runs it"]
fn missing_processes_are_named() {
    let quick = Options { join: Duration::from_secs(1), ..quick() };
    let port = port();
    let (first, second) = std::thread::scope(|scope| {
        let first = scope.spawn(move || Links::join(&place(0, 4, port), &[], quick).map(drop));
        let long = Options { join: Duration::from_secs(9), ..quick };
        let second = Links::join(&place(2, 4, port), &[], long).map(drop);
        (message(first.join().unwrap()), message(second))
    });
    assert_eq!(first, "2 of 4 processes have not come within 1 s: rank 1, 3");
    assert!(second.contains(&first), "{second}");
    // Without process 0.
    let text = message(within(3.0, || Links::join(&place(1, 2, port), &[], quick).map(drop)));
    assert_eq!(text, format!("rank 0 at 127.0.0.1:{port} was not reached within 1 s: connection refused"));
}

#[test]
#[ignore = "connects by TCP and waits; .ci/soak runs it"]
fn strangers_do_no_harm() {
    let port = port();
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..2)
            .map(|rank| {
                scope.spawn(move || {
                    if rank == 1 {
                        std::thread::sleep(Duration::from_millis(500));
                    }
                    Links::join(&place(rank, 2, port), &[], quick()).unwrap().finish().unwrap();
                })
            })
            .collect();
        std::thread::sleep(Duration::from_millis(100));
        let silent: Vec<_> = (0..20).map(|_| TcpStream::connect(("127.0.0.1", port)).unwrap()).collect();
        for bytes in [
            &b"GET / HTTP/1.1\r\n\r\n"[..],
            b"perilune",
            b"perilune\x01\0\0\0\xff\xff\xff\xff",
            b"perilune\x01\0\0\0\x03\0\0\0abc",
        ] {
            TcpStream::connect(("127.0.0.1", port)).unwrap().write_all(bytes).unwrap();
        }
        // A process of another release is told so.
        let mut other = TcpStream::connect(("127.0.0.1", port)).unwrap();
        other.write_all(b"perilune\x09\0\0\0\0\0\0\0").unwrap();
        let mut answer = Vec::new();
        other.read_to_end(&mut answer).unwrap();
        assert!(String::from_utf8_lossy(&answer).contains("uses version 9 of the protocol, and rank 0 version 1"));
        all.into_iter().for_each(|t| t.join().unwrap());
        drop(silent);
    });
    // Another program answers.
    let listener = std::net::TcpListener::bind(("127.0.0.1", port)).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| listener.accept().unwrap().0.write_all(b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n").unwrap());
        let text = message(Links::join(&place(1, 2, port), &[], quick()).map(drop));
        assert_eq!(text, format!("127.0.0.1:{port} answers, but it is not rank 0 of a job of Perilune"));
    });
}

/// Process 1 of 2 whose bytes a test writes itself.
fn by_hand(port: u16) -> TcpStream {
    let mut hello = Encoder::default().u8(2).u32(1).text("b", 9).u32(1).u32(4);
    for (name, value) in [
        ("job", ""),
        ("restart of the job", "0"),
        ("version of Perilune", env!("CARGO_PKG_VERSION")),
        ("number of processes", "2"),
    ] {
        hello = hello.text(name, 99).text(value, 99);
    }
    let mut out = b"perilune\x01\0\0\0".to_vec();
    out.extend((hello.0.len() as u32).to_le_bytes());
    out.extend(hello.0);
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        if let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) {
            stream.write_all(&out).unwrap();
            let mut head = [0; 16];
            stream.read_exact(&mut head).unwrap();
            let mut rest = vec![0; u32::from_le_bytes(head[12..].try_into().unwrap()) as usize];
            stream.read_exact(&mut rest).unwrap();
            // It enters the first call, the barrier of the start.
            let head = Encoder::default().u64(1).u8(1).text("reach start", 99).0;
            stream.write_all(&frame::header(Kind::Call, head.len())).unwrap();
            stream.write_all(&head).unwrap();
            return stream;
        }
        assert!(Instant::now() < until);
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn first_message(from: usize, group: crate::Group) -> Vec<u8> {
    let round = Round { run: 1, group, number: 0 };
    MessageHead { exchange: 1, round, program: 0, from, to: None }.encode()
}

/// A message of device 1 to one device only.
fn first_mail(to: usize) -> Vec<u8> {
    let round = Round { run: 1, group: crate::Group::ALL, number: 0 };
    MessageHead { exchange: 1, round, program: 0, from: 1, to: Some(to) }.encode()
}

/// What process 0 says when the hand-written process 1 sends these pieces, each after a pause, and then nothing, or its end.
fn facing(pieces: &[Vec<u8>], pause: Duration, closes: bool) -> Result<usize> {
    let port = port();
    std::thread::scope(|scope| {
        let first = scope.spawn(move || {
            let links = Links::join(&place(0, 2, port), &[], quick()).unwrap();
            let exchange = links.exchange(Mesh::parse("dp=2").unwrap(), &[0, 1]).unwrap();
            let result = Rank::new(exchange, 1, 0).exchange(Axis::Dp, &[1; 100]).map(|all| all[1].len());
            if result.is_ok() {
                assert_eq!(links.cause(), None);
            }
            result
        });
        let mut stream = by_hand(port);
        for piece in pieces {
            std::thread::sleep(pause);
            stream.write_all(piece).unwrap();
        }
        let kept = Some(stream).filter(|_| !closes);
        let result = first.join().unwrap();
        drop(kept);
        result
    })
}

#[test]
#[ignore = "connects by TCP and waits; .ci/soak runs it"]
fn broken_connections_are_noticed() {
    let group = crate::Group::along(Axis::Dp, [0; Axis::ALL.len()]);
    let head = first_message(1, group);
    let mut half = frame::header(Kind::Message, head.len() + 1000).to_vec();
    half.extend(&head);
    half.extend([7; 400]);
    let whole = {
        let mut bytes = half.clone();
        bytes.extend([7; 600]);
        bytes
    };
    let now = Duration::ZERO;
    assert_eq!(facing(&[whole], now, false).unwrap(), 1000);
    // Cut in the middle of a frame, of a header, and between frames.
    for bytes in [half.clone(), half[..7].to_vec(), Vec::new()] {
        let text = message(within(3.0, || facing(&[bytes], now, true)));
        assert!(text.starts_with("rank 1 ended without a message: it was killed"), "{text}");
    }
    // Silence in the middle of a frame, and between frames.
    for bytes in [half.clone(), Vec::new()] {
        let text = message(within(6.0, || facing(&[bytes], now, false)));
        assert_eq!(text, "rank 1 has not answered for 3 s");
    }
    // What cannot be read.
    let mut wrong = frame::header(Kind::Call, 0).to_vec();
    wrong[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    let with = |kind, payload: &[u8]| [&frame::header(kind, payload.len())[..], payload].concat();
    let not_its_own = with(Kind::Message, &first_message(0, group));
    let no_member = with(Kind::Message, &first_message(2, group));
    for (bytes, what) in [
        (wrong, "it has sent a frame of 18446744073709551615 bytes, and the limit is 268435456"),
        (b"HTTP/1.1 400 Bad Request\r\n".to_vec(), "it has sent bytes that are no frame"),
        (with(Kind::Message, &[1; 5]), "it has sent a frame that cannot be read"),
        (with(Kind::Abort, &[1; 5]), "it has sent a frame that cannot be read"),
        (with(Kind::Call, &[]), "it has sent a frame that cannot be read"),
        (not_its_own, "it has sent the message of a device that it does not drive"),
        (no_member, "it has sent the message of a device that it does not drive"),
        (with(Kind::Message, &first_mail(1)), "it has sent a message for a device of another process"),
        (with(Kind::Message, &first_mail(2)), "it has sent the message of a device that it does not drive"),
    ] {
        let start = Instant::now();
        let text = message(facing(&[bytes], now, false));
        assert!(start.elapsed() < Duration::from_secs(3), "{what}: {:?}", start.elapsed());
        assert_eq!(text, format!("rank 1 and rank 0 do not understand each other: {what}"));
    }
    assert_eq!(half.len(), HEADER + head.len() + 400);
}

#[test]
#[ignore = "connects by TCP and waits; .ci/soak runs it"]
fn a_slow_connection_is_no_failure() {
    let group = crate::Group::along(Axis::Dp, [0; Axis::ALL.len()]);
    let head = first_message(1, group);
    let mut bytes = frame::header(Kind::Message, head.len() + 1000).to_vec();
    bytes.extend(&head);
    bytes.extend([7; 1000]);
    // Five seconds, longer than the silence that is allowed.
    let pieces: Vec<Vec<u8>> = bytes.chunks(bytes.len().div_ceil(50)).map(<[u8]>::to_vec).collect();
    assert_eq!(facing(&pieces, Duration::from_millis(100), false).unwrap(), 1000);
}

/// Bytes a second of an exchange on the loopback device. `PERILUNE_BANDWIDTH=1` prints it.
#[test]
#[ignore = "connects by TCP and waits; .ci/soak runs it"]
fn bandwidth() {
    if std::env::var_os("PERILUNE_BANDWIDTH").is_none() {
        return;
    }
    for n in [2, 4] {
        let mesh = Mesh::new(&[(Axis::Dp, n)]).unwrap();
        for size in [1usize << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20] {
            let times = on_all(n, |links| {
                let exchange = links.exchange(mesh, &(0..n).collect::<Vec<_>>()).unwrap();
                let rank = Rank::new(exchange, 1, links.rank());
                let bytes = vec![1; size];
                let count = ((64 << 20) / size).clamp(3, 2000);
                rank.exchange(Axis::Dp, &bytes).unwrap();
                let start = Instant::now();
                for _ in 0..count {
                    rank.exchange(Axis::Dp, &bytes).unwrap();
                }
                let each = start.elapsed().as_secs_f64() / count as f64;
                links.finish().unwrap();
                each
            });
            let each = times.iter().copied().fold(0.0, f64::max);
            let rate = size as f64 * (n - 1) as f64 / each / 1e9;
            eprintln!("{n} processes, {size:>9} bytes: {:8.1} us, {rate:.2} GB/s into each", each * 1e6);
        }
    }
}
