//! Runs a compiled program: fills in addresses, queues its steps, captures and replays them as a CUDA graph, and times
//! kernels.

use super::errors::FAULT_WORDS;
use super::{Compiled, CudaExecutable, DeviceErrors, Step};
use crate::backend::{DeviceContext, address, written};
use crate::blas::Addresses;
use crate::dnn;
use crate::driver::{Address, Event, Replay, TensorMap};
use crate::launch::{Arg, Word};
use perilune_core::error::{Error, Result};
use perilune_plan::ir::{Origin, Program, Storage, ValueId};
use perilune_plan::{Buffer, Executable, Failure, RunContext};
use std::ffi::c_void;
use std::sync::{Arc, PoisonError};

/// Number of runs that launch each kernel separately and synchronize if an index may be bad.
const CAREFUL_RUNS: u64 = 2;
/// Maximum captured graphs of a program, one for each set of addresses.
const GRAPHS: usize = 64;

/// The address of each value in this run.
fn places(program: &Program, arena: Address, inputs: &[Buffer], outputs: &[Buffer]) -> Result<Vec<Address>> {
    let given = |list: &[Buffer], k: usize, nbytes: usize| match list.get(k) {
        Some(b) => address(b, nbytes),
        None => Err(Error::system("cuda", format!("this is a bug: buffer {k} is missing"))),
    };
    let place = |v: &perilune_plan::ir::Value| match v.storage {
        Storage::Input(k) => given(inputs, k as usize, v.nbytes()),
        Storage::Output(k) => given(outputs, k as usize, v.nbytes()),
        Storage::Arena(at) => Ok(arena + at as u64),
    };
    program.values.iter().map(place).collect()
}

impl Compiled {
    /// Updates the tables that differ from those of the last run.
    fn tables(&mut self, context: &DeviceContext, places: &[Address]) -> Result<()> {
        let launches = self.steps.iter_mut().map(|s| &mut s.1);
        let tables = launches.filter_map(|s| if let Step::Launch { tables, .. } = s { Some(tables) } else { None });
        for t in tables.flatten() {
            let words: Vec<u64> = t
                .words
                .iter()
                .map(|w| match w {
                    Word::Number(n) => *n,
                    Word::Value(v, offset) => places[v.0 as usize].wrapping_add_signed(*offset),
                })
                .collect();
            if t.last != words {
                let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
                context.device.upload(t.buffer.address, &bytes)?;
                t.last = words;
            }
        }
        Ok(())
    }

    /// Queues one step.
    fn queue(&self, context: &DeviceContext, step: &Step, places: &[Address]) -> Result<()> {
        let at = |v: &ValueId| places[v.0 as usize];
        let place = |a: &Arg| match a {
            Arg::Value(v, offset) => at(v).wrapping_add_signed(*offset),
            Arg::Scratch(n) => context.scratch.base + *n as u64,
            _ => 0,
        };
        match step {
            Step::Conv { plan, call } => {
                let Some(dnn) = context.opened_dnn() else { return Ok(()) };
                let scratch = context.scratch.base;
                let (x, w, y) = (place(&call.x), place(&call.w), place(&call.y));
                dnn.run(plan, dnn::Addresses { x, w, y, scratch: scratch + call.scratch as u64 })
            }
            Step::Fp8 { gemm, operands: o } => {
                let [a, b, out] = [&o.a, &o.b, &o.out].map(place);
                let bias = o.bias.as_ref().map_or(0, place);
                let scales = [place(&o.scales[0]), place(&o.scales[1])];
                context.blas.run(gemm, Addresses { a, b, out, bias, residual: 0, scales })
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
                    context.blas.run(gemm, addresses)?;
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
                entry.launch(&context.device, launch.grid, launch.block, launch.shared_bytes, &mut args)
            }
        }
    }

    /// Queues all steps; an error comes with the kernel that caused it.
    fn queue_all(&self, context: &DeviceContext, places: &[Address]) -> std::result::Result<(), (usize, Error)> {
        self.steps.iter().try_for_each(|(k, step)| self.queue(context, step, places).map_err(|e| (*k, e)))
    }

    fn run_steps(
        &mut self,
        context: &mut DeviceContext,
        program: &Program,
        inputs: &[Buffer],
        slots: &[u64],
        outputs: &[Buffer],
        times: Option<&mut [f64]>,
    ) -> std::result::Result<(), (usize, Error)> {
        let first = |e| (0, e);
        context.arena.ensure(program.arena_bytes).map_err(first)?;
        context.scratch.ensure(self.scratch).map_err(first)?;
        let context = &*context;
        let places = places(program, context.arena.base, inputs, outputs).map_err(first)?;
        let bytes: Vec<u8> = slots[..program.slots.len()].iter().flat_map(|w| w.to_le_bytes()).collect();
        context.device.upload(self.slots.address, &bytes).map_err(first)?;
        self.tables(context, &places).map_err(first)?;
        if let Some(times) = times {
            return self.timed(context, &places, times);
        }
        if context.replay && self.runs >= CAREFUL_RUNS && self.steps.len() > 1 {
            let known = self.replays.iter().position(|r| r.0 == places);
            if let Some((places, replay)) = known.and_then(|at| self.replays.remove(at)) {
                // The addresses occurred before, so a capture is worthwhile.
                let replay = match replay {
                    Some(r) => r,
                    None => {
                        let queue = || self.queue_all(context, &places).map_err(|e| e.1);
                        Replay::capture(&context.device, queue).map_err(first)?
                    }
                };
                let done = replay.launch().map_err(first);
                self.replays.push_front((places, Some(replay)));
                return done;
            }
            self.replays.push_front((places.clone(), None));
            self.replays.truncate(GRAPHS);
        }
        self.queue_all(context, &places)
    }

    fn timed(
        &self,
        context: &DeviceContext,
        places: &[Address],
        times: &mut [f64],
    ) -> std::result::Result<(), (usize, Error)> {
        let device = &context.device;
        let mut events = Vec::with_capacity(self.steps.len() + 1);
        events.push(Event::record(device).map_err(|e| (0, e))?);
        for (k, step) in &self.steps {
            let at = |e| (*k, e);
            self.queue(context, step, places).map_err(at)?;
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
        context: RunContext<'_>,
    ) -> std::result::Result<(), Failure> {
        let RunContext { interrupt, times } = context;
        let origin = |k: usize| self.program.kernels.get(k).map_or(Origin::NONE, |k| k.origin());
        if slots.len() < self.program.slots.len() {
            let error = Error::system("cuda", "this is a bug: a run-time number is missing");
            return Err(Failure { origin: origin(0), error });
        }
        let first = |error| Failure { origin: origin(0), error };
        let context = &mut *self.shared.lock().map_err(first)?;
        // Kernels are queued in less time than an interrupt takes to arrive; another thread's run may have held the device.
        interrupt.check().map_err(first)?;
        let compiled = &mut *self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        // A fault of an earlier run.
        let fault = |cells: &Arc<DeviceErrors>| match cells.take() {
            Some((origin, error)) => Err(Failure { origin, error }),
            None => Ok(()),
        };
        compiled.cells.as_ref().map_or(Ok(()), fault)?;
        let number = context.beside.number();
        let states = compiled.writes.iter().filter_map(|k| inputs.get(*k));
        states.chain(outputs).for_each(|buffer| written(buffer, number));
        let done = compiled.run_steps(context, &self.program, inputs, slots, outputs, times);
        done.map_err(|(k, error)| Failure { origin: origin(k), error })?;
        context.beside.mark().map_err(first)?;
        compiled.runs += 1;
        if compiled.runs <= CAREFUL_RUNS
            && let Some(cells) = &compiled.cells
        {
            context.device.synchronize().map_err(first)?;
            fault(cells)?;
        }
        Ok(())
    }
}
