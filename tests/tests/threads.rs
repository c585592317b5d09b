//! Tests devices shared by threads: programs, buffers and executables of one device are used by several threads and moved between them;
//! an interrupt ends the runs of one engine only.
#![allow(clippy::unwrap_used)]

use perilune_core::{DType, HostTensor, Interrupt, Kind};
use perilune_cpu::Cpu;
use perilune_engine::Engine;
use perilune_lua::{Runtime, RuntimeOptions};
use perilune_plan::ir::Program;
use perilune_plan::{Backend, Buffer, BufferDesc, Executable, RunContext};
use perilune_tests::harness;
use perilune_tests::recording::Recording;
use perilune_tests::rng::Pcg;
use std::rc::Rc;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

/// Two training steps of a small network, with dropout, a library op and values read in the middle.
const TRAINING: &str = r#"
local pl = require "perilune"
local nn = require "perilune.nn"
pl.seed(3)
local net = nn.Sequential { nn.Linear(24, 96), nn.GELU(), nn.Dropout(0.2), nn.Linear(96, 10) }
local opt = require("perilune.optim").AdamW(net, { lr = 1e-3 })
for _ = 1, 2 do
  local x, y = pl.randn({ 64, 24 }), pl.zeros({ 64 }, { dtype = "i64" })
  local loss = net(x):cross_entropy(y)
  print(x:sum():item())
  loss:backward()
  opt:step()
end
print(pl.randn({ 300, 300 }):matmul(pl.randn({ 300, 300 })):softmax(-1):sum():item())
"#;

/// The programs of a training loop, planned for the CPU.
fn programs() -> Vec<Arc<Program>> {
    let backend = Recording::new(Box::new(Cpu::new(Some(1))));
    let policy = perilune_tests::scripts::policy(&[]);
    let options =
        RuntimeOptions { backend: backend.clone(), params: Vec::new(), policy, strict: true, print: Rc::new(|_| ()) };
    let runtime = Runtime::new(options).unwrap();
    runtime.load_text(TRAINING, "@training.lua").unwrap_or_else(|e| panic!("{e}"));
    backend.take()
}

/// Makes the inputs of a program: normal floats and zeros.
fn inputs(program: &Program, seed: u64) -> Vec<HostTensor> {
    let mut rng = Pcg::new(seed);
    let one = |(shape, dtype): &(perilune_core::Shape, DType)| {
        let value = |_| if dtype.is_float() { rng.normal() } else { 0.0 };
        HostTensor::from_f64(*dtype, *shape, &(0..shape.numel()).map(value).collect::<Vec<_>>())
    };
    program.inputs.iter().map(one).collect()
}

fn slots(program: &Program) -> Vec<u64> {
    program.slots.iter().map(|d| if d.is_float() { 0.5f64.to_bits() } else { 3 }).collect()
}

fn upload(device: &dyn Backend, t: &HostTensor) -> Buffer {
    device.upload(&BufferDesc::new(t.shape, t.dtype), &t.bytes).unwrap()
}

/// Runs a program once, over fresh buffers: its outputs and what its inputs hold afterwards.
fn run(device: &dyn Backend, program: &Program, exec: &dyn Executable, from: &[HostTensor]) -> Vec<Vec<u8>> {
    let inputs: Vec<Buffer> = from.iter().map(|t| upload(&*device, t)).collect();
    let outputs: Vec<Buffer> = program.outputs.iter().map(|desc| device.alloc(desc).unwrap()).collect();
    exec.run(&inputs, &slots(program), &outputs, RunContext::new(&Interrupt::default()))
        .unwrap_or_else(|f| panic!("{}", f.error));
    inputs.iter().chain(&outputs).map(|b| device.download(b).unwrap()).collect()
}

#[test]
fn programs_of_one_device_have_the_same_bits_from_any_thread() {
    let programs = programs();
    assert!(programs.len() >= 3 && programs.iter().any(|p| p.kernels.len() > 4), "{} programs", programs.len());
    let alone = Cpu::new(Some(1));
    let want: Vec<Vec<Vec<u8>>> = programs
        .iter()
        .enumerate()
        .map(|(k, p)| run(&alone, p, &*alone.compile(p.clone()).unwrap(), &inputs(p, k as u64)))
        .collect();
    let device = Arc::new(Cpu::new(Some(2)));
    // One shared executable of each program, and one that each thread compiles.
    let shared: Vec<Box<dyn Executable>> = programs.iter().map(|p| device.compile(p.clone()).unwrap()).collect();
    thread::scope(|scope| {
        for t in 0..4 {
            let (device, programs, shared, want) = (device.clone(), &programs, &shared, &want);
            scope.spawn(move || {
                for round in 0..6 {
                    // Each thread uses a different order.
                    for at in 0..programs.len() {
                        let k = (at * (2 * t + 1) + round) % programs.len();
                        let (p, from) = (&programs[k], inputs(&programs[k], k as u64));
                        let own = device.compile(p.clone()).unwrap();
                        assert!(run(&*device, p, &*own, &from) == want[k], "program {k}, thread {t}");
                        assert!(run(&*device, p, &*shared[k], &from) == want[k], "shared program {k}, thread {t}");
                    }
                }
            });
        }
    });
    drop(shared);
    assert!(device.memory().allocated >= programs.iter().map(|p| p.arena_bytes).max().unwrap());
}

#[test]
fn a_device_moves_to_another_thread_with_its_buffers_and_programs() {
    let program = programs().into_iter().max_by_key(|p| p.kernels.len()).unwrap();
    let from = inputs(&program, 1);
    let device: Box<dyn Backend> = Box::new(Cpu::new(Some(2)));
    let exec = device.compile(program.clone()).unwrap();
    let want = run(&*device, &program, &*exec, &from);
    let inputs: Vec<Buffer> = from.iter().map(|t| upload(&*device, t)).collect();
    let outputs: Vec<Buffer> = program.outputs.iter().map(|desc| device.alloc(desc).unwrap()).collect();
    let numbers = slots(&program);
    // Moves to the thread, runs over buffers made here, and returns with the buffers that it made.
    let (device, all) = thread::spawn(move || {
        exec.run(&inputs, &numbers, &outputs, RunContext::new(&Interrupt::default()))
            .unwrap_or_else(|f| panic!("{}", f.error));
        (device, [inputs, outputs].concat())
    })
    .join()
    .unwrap();
    let got: Vec<Vec<u8>> = all.iter().map(|b| device.download(b).unwrap()).collect();
    assert!(got == want);
}

/// Evaluates `n` sums of random numbers, one plan each, and returns them; or the kind of the first error.
fn evaluate(engine: &mut Engine, n: usize) -> Result<Vec<f64>, Kind> {
    let ones = |_| -> Result<f64, Kind> {
        let noise = harness::call(engine, "randn", &[harness::ints(&[200, 300])], &[]).unwrap();
        let sum = harness::call(engine, "sum", &[harness::t(noise)], &[]).unwrap();
        let value = engine.read_node(sum).map_err(|f| f.error.kind)?.get_f64(0);
        engine.flush().unwrap();
        Ok(value)
    };
    (0..n).map(ones).collect()
}

#[test]
fn an_interrupt_ends_the_run_of_its_own_engine() {
    let device = Arc::new(Cpu::new(Some(2)));
    let want = evaluate(&mut Engine::new(device.clone()), 200);
    let (send, receive) = mpsc::channel();
    let one = |interrupted: bool| {
        let (device, send) = (device.clone(), send.clone());
        move || {
            let mut engine = Engine::new(device);
            if interrupted {
                send.send(engine.interrupt.clone()).unwrap();
                // Runs until it is interrupted, then continues.
                let ended = evaluate(&mut engine, usize::MAX);
                assert!(engine.interrupt.clear());
                let after = evaluate(&mut engine, 3).map(|all| all.len());
                return (ended, after);
            }
            (evaluate(&mut engine, 200), Ok(3))
        }
    };
    thread::scope(|scope| {
        let (first, second) = (scope.spawn(one(true)), scope.spawn(one(false)));
        let interrupt = receive.recv().unwrap();
        thread::sleep(Duration::from_millis(30));
        interrupt.request();
        assert_eq!(first.join().unwrap(), (Err(Kind::Interrupted), Ok(3)));
        assert_eq!(second.join().unwrap(), (want, Ok(3)));
    });
}

#[test]
fn a_run_ends_before_its_first_kernel_and_no_other_run_does() {
    let program = programs().into_iter().max_by_key(|p| p.kernels.len()).unwrap();
    let device = Cpu::new(Some(1));
    let exec = device.compile(program.clone()).unwrap();
    let inputs: Vec<Buffer> = inputs(&program, 1).iter().map(|t| upload(&device, t)).collect();
    let outputs: Vec<Buffer> = program.outputs.iter().map(|desc| device.alloc(desc).unwrap()).collect();
    let (stopped, free) = (Interrupt::default(), Interrupt::default());
    stopped.request();
    let failure = exec.run(&inputs, &slots(&program), &outputs, RunContext::new(&stopped)).unwrap_err();
    assert_eq!(failure.error.kind, Kind::Interrupted);
    assert!(exec.run(&inputs, &slots(&program), &outputs, RunContext::new(&free)).is_ok());
}
