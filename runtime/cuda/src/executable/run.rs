//! Runs a compiled program: fills in addresses, queues its steps, captures and replays them as a CUDA graph, and times
//! kernels.

use super::errors::FAULT_WORDS;
use super::{CudaExecutable, DeviceErrors, Step};
use crate::backend::{address, written};
use crate::blas::Addresses;
use crate::dnn;
use crate::driver::{Address, Event, Replay, TensorMap};
use crate::launch::{Arg, Word};
use perilune_core::error::{Error, Result};
use perilune_plan::ir::{Origin, Storage, ValueId};
use perilune_plan::{Buffer, Executable, Failure};
use std::ffi::c_void;
use std::rc::Rc;

/// Number of runs that launch each kernel separately and synchronize if an index may be bad.
const CAREFUL_RUNS: u64 = 2;
/// Maximum captured graphs of a program, one for each set of addresses.
const GRAPHS: usize = 64;

impl CudaExecutable {
    fn places(&self, inputs: &[Buffer], outputs: &[Buffer]) -> Result<Vec<Address>> {
        let arena = self.shared.arena.borrow().base;
        let given = |list: &[Buffer], k: usize, nbytes: usize| match list.get(k) {
            Some(b) => address(b, nbytes),
            None => Err(Error::system("cuda", format!("this is a bug: buffer {k} is missing"))),
        };
        let place = |v: &perilune_plan::ir::Value| match v.storage {
            Storage::Input(k) => given(inputs, k as usize, v.nbytes()),
            Storage::Output(k) => given(outputs, k as usize, v.nbytes()),
            Storage::Arena(at) => Ok(arena + at as u64),
        };
        self.program.values.iter().map(place).collect()
    }

    /// Updates the tables that differ from those of the last run.
    fn tables(&self, places: &[Address]) -> Result<()> {
        let tables =
            self.steps.iter().filter_map(|s| if let Step::Launch { tables, .. } = &s.1 { Some(tables) } else { None });
        for t in tables.flatten() {
            let words: Vec<u64> = t
                .words
                .iter()
                .map(|w| match w {
                    Word::Number(n) => *n,
                    Word::Value(v, offset) => places[v.0 as usize].wrapping_add_signed(*offset),
                })
                .collect();
            if *t.last.borrow() != words {
                let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
                self.shared.device.upload(t.buffer.address, &bytes)?;
                *t.last.borrow_mut() = words;
            }
        }
        Ok(())
    }

    /// Queues one step.
    fn queue(&self, step: &Step, places: &[Address]) -> Result<()> {
        let at = |v: &ValueId| places[v.0 as usize];
        let place = |a: &Arg| match a {
            Arg::Value(v, offset) => at(v).wrapping_add_signed(*offset),
            Arg::Scratch(n) => self.shared.scratch.borrow().base + *n as u64,
            _ => 0,
        };
        match step {
            Step::Conv { plan, call } => {
                let Some(dnn) = self.shared.dnn() else { return Ok(()) };
                let scratch = self.shared.scratch.borrow().base;
                let (x, w, y) = (place(&call.x), place(&call.w), place(&call.y));
                dnn.run(plan, dnn::Addresses { x, w, y, scratch: scratch + call.scratch as u64 })
            }
            Step::Fp8 { gemm, operands: o } => {
                let [a, b, out] = [&o.a, &o.b, &o.out].map(place);
                let bias = o.bias.as_ref().map_or(0, place);
                let scales = [place(&o.scales[0]), place(&o.scales[1])];
                self.shared.blas.run(gemm, Addresses { a, b, out, bias, residual: 0, scales })
            }
            Step::Gemm { gemm, product, a, b, out, bias, residual, size } => {
                for (oa, ob, oc) in &product.offsets {
                    let shift = |base: Address, n: isize| base.wrapping_add_signed((n * *size as isize) as i64);
                    let addresses = Addresses {
                        a: shift(at(a), *oa),
                        b: shift(at(b), *ob),
                        out: shift(at(out), *oc as isize),
                        bias: bias.map_or(0, |(v, n)| shift(at(&v), n)),
                        residual: residual.map_or(0, |v| shift(at(&v), *oc as isize)),
                        scales: [0; 2],
                    };
                    self.shared.blas.run(gemm, addresses)?;
                }
                Ok(())
            }
            Step::Launch { launch, entry, tables, fault } => {
                let mut tables = tables.iter();
                let mut words: Vec<u64> = launch
                    .args
                    .iter()
                    .map(|a| match a {
                        Arg::Value(..) | Arg::Scratch(_) => place(a),
                        Arg::Slots => self.slots.address,
                        Arg::Fault => {
                            self.cells.as_ref().map_or(0, |c| c.memory.address) + (fault * FAULT_WORDS * 8) as u64
                        }
                        Arg::I32(x) => *x as u32 as u64,
                        Arg::I64(x) => *x as u64,
                        Arg::F32(x) => u64::from(x.to_bits()),
                        Arg::F64(x) => x.to_bits(),
                        Arg::Bytes(_) | Arg::Map(..) => 0,
                        Arg::Table(_) => tables.next().map_or(0, |t| t.buffer.address),
                    })
                    .collect();
                let mut maps = Vec::new();
                for arg in &launch.args {
                    if let Arg::Map(of, boxes) = arg {
                        maps.push(TensorMap::new(place(of), boxes)?);
                    }
                }
                let mut maps = maps.iter();
                let mut args: Vec<*mut c_void> = Vec::with_capacity(words.len());
                for (word, arg) in words.iter_mut().zip(&launch.args) {
                    args.push(match arg {
                        Arg::Bytes(b) => b.as_ptr().cast_mut().cast(),
                        Arg::Map(..) => maps.next().map_or(std::ptr::null_mut(), TensorMap::pointer),
                        _ => std::ptr::from_mut(word).cast(),
                    });
                }
                entry.launch(&self.shared.device, launch.grid, launch.block, launch.shared_bytes, &mut args)
            }
        }
    }

    /// Queues all steps; an error comes with the kernel that caused it.
    fn queue_all(&self, places: &[Address]) -> std::result::Result<(), (usize, Error)> {
        self.steps.iter().try_for_each(|(k, step)| self.queue(step, places).map_err(|e| (*k, e)))
    }

    fn run_steps(
        &self,
        inputs: &[Buffer],
        slots: &[u64],
        outputs: &[Buffer],
        times: Option<&mut [f64]>,
    ) -> std::result::Result<(), (usize, Error)> {
        let first = |e| (0, e);
        let shared = &self.shared;
        shared.arena.borrow_mut().ensure(self.program.arena_bytes).map_err(first)?;
        shared.scratch.borrow_mut().ensure(self.scratch).map_err(first)?;
        let places = self.places(inputs, outputs).map_err(first)?;
        let bytes: Vec<u8> = slots[..self.program.slots.len()].iter().flat_map(|w| w.to_le_bytes()).collect();
        shared.device.upload(self.slots.address, &bytes).map_err(first)?;
        self.tables(&places).map_err(first)?;
        if let Some(times) = times {
            return self.timed(&places, times);
        }
        if shared.replay && self.runs.get() >= CAREFUL_RUNS && self.steps.len() > 1 {
            let mut replays = self.replays.borrow_mut();
            let known = replays.iter().position(|r| r.0 == places);
            if let Some((places, replay)) = known.and_then(|at| replays.remove(at)) {
                // The addresses occurred before, so a capture is worthwhile.
                let replay = match replay {
                    Some(r) => r,
                    None => {
                        Replay::capture(&shared.device, || self.queue_all(&places).map_err(|e| e.1)).map_err(first)?
                    }
                };
                let done = replay.launch().map_err(first);
                replays.push_front((places, Some(replay)));
                return done;
            }
            replays.push_front((places.clone(), None));
            replays.truncate(GRAPHS);
        }
        self.queue_all(&places)
    }

    fn timed(&self, places: &[Address], times: &mut [f64]) -> std::result::Result<(), (usize, Error)> {
        let device = &self.shared.device;
        let mut events = Vec::with_capacity(self.steps.len() + 1);
        events.push(Event::record(device).map_err(|e| (0, e))?);
        for (k, step) in &self.steps {
            let at = |e| (*k, e);
            self.queue(step, places).map_err(at)?;
            events.push(Event::record(device).map_err(at)?);
        }
        device.synchronize().map_err(|e| (0, e))?;
        for (i, (k, _)) in self.steps.iter().enumerate() {
            times[*k] += events[i + 1].since(&events[i]).map_err(|e| (*k, e))?;
        }
        Ok(())
    }
}

impl Executable for CudaExecutable {
    fn run(
        &self,
        inputs: &[Buffer],
        slots: &[u64],
        outputs: &[Buffer],
        times: Option<&mut [f64]>,
    ) -> std::result::Result<(), Failure> {
        let origin = |k: usize| self.program.kernels.get(k).map_or(Origin::NONE, |k| k.origin());
        if slots.len() < self.program.slots.len() {
            let error = Error::system("cuda", "this is a bug: a run-time number is missing");
            return Err(Failure { origin: origin(0), error });
        }
        // A fault of an earlier run.
        let fault = |cells: &Rc<DeviceErrors>| match cells.take() {
            Some((origin, error)) => Err(Failure { origin, error }),
            None => Ok(()),
        };
        self.cells.as_ref().map_or(Ok(()), fault)?;
        let number = self.shared.beside.number();
        let states = self.writes.iter().filter_map(|k| inputs.get(*k));
        states.chain(outputs).for_each(|buffer| written(buffer, number));
        self.run_steps(inputs, slots, outputs, times).map_err(|(k, error)| Failure { origin: origin(k), error })?;
        self.shared.beside.mark().map_err(|error| Failure { origin: origin(0), error })?;
        self.runs.set(self.runs.get() + 1);
        if self.runs.get() <= CAREFUL_RUNS
            && let Some(cells) = &self.cells
        {
            self.shared.device.synchronize().map_err(|error| Failure { origin: origin(0), error })?;
            fault(cells)?;
        }
        Ok(())
    }
}
