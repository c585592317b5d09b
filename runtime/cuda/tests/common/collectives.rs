//! Describes collectives of all kinds, dtypes and sizes, with their data, and computes them on CPU devices.
#![allow(dead_code)]

use super::common::{Sketch, int, t};
use super::virtual_mesh::{self, Planned};
use perilune_core::mesh::{Axis, Combine};
use perilune_core::ops::collective::{
    ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, COLLECTIVE_PERMUTE, REDUCE_SCATTER, WIDENED, code, permutation,
};
use perilune_core::{DType, HostTensor, Mesh, Shape};
use perilune_cpu::Cpu;
use perilune_plan::{Backend, Null};

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Kind {
    AllReduce(Combine),
    AllGather(usize),
    ReduceScatter(usize, Combine),
    AllToAll,
    /// From the device so many places before.
    Shift(usize),
    /// From the device at the same place from the other end.
    Reverse,
}

/// How the collective's operand lies in the leaf.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Lie {
    Whole,
    /// Without its first element along dim 0: at an odd address.
    Tail,
    /// The dims reversed.
    Turned,
}

/// One collective along an axis.
#[derive(Clone, Debug)]
pub struct Case {
    pub kind: Kind,
    pub dtype: DType,
    /// Dims of a piece; of `Turned` ones, in reverse order.
    pub dims: Vec<usize>,
    pub lie: Lie,
    pub axis: Axis,
    pub ranks: usize,
    /// Whether a sum of 16-bit floats is given in f32.
    pub widened: bool,
}

const COMBINES: [Combine; 3] = [Combine::Sum, Combine::Max, Combine::Min];

/// Every collective, dtype and combination over that many devices, along odd sizes and dims.
pub fn cases(ranks: usize, axis: Axis) -> Vec<Case> {
    let mut out = Vec::new();
    for dtype in DType::ALL {
        let mut add = |kind, dims: &[usize], lie| {
            let case = Case { kind, dtype, dims: dims.to_vec(), lie, axis, ranks, widened: false };
            let sums = matches!(kind, Kind::AllReduce(Combine::Sum) | Kind::ReduceScatter(_, Combine::Sum));
            out.extend((sums && dtype.is_half()).then(|| Case { widened: true, ..case.clone() }));
            out.push(case);
        };
        for combine in COMBINES {
            for n in [0, 1, 7, 4097, 1 << 20] {
                add(Kind::AllReduce(combine), &[n], Lie::Whole);
            }
            add(Kind::AllReduce(combine), &[4098], Lie::Tail);
            add(Kind::AllReduce(combine), &[300_001], Lie::Tail);
            add(Kind::AllReduce(combine), &[5, 30], Lie::Turned);
            let r = ranks;
            for (dims, dim) in [
                (vec![0], 0),
                (vec![r], 0),
                (vec![7 * r], 0),
                (vec![4097 * r], 0),
                (vec![16 * r], 0),
                (vec![3, 8 * r, 16], 1),
                (vec![3, 5 * r, 7], 1),
                (vec![9, 4 * r], 1),
                (vec![2, 3, r], 2),
                (vec![33, 512 * r], 1),
            ] {
                add(Kind::ReduceScatter(dim, combine), &dims, Lie::Whole);
            }
            add(Kind::ReduceScatter(1, combine), &[4, 8 * r], Lie::Tail);
            add(Kind::ReduceScatter(1, combine), &[6 * r, 8 * r], Lie::Turned);
        }
        for (dims, dim) in [
            (&[0][..], 0),
            (&[1], 0),
            (&[7], 0),
            (&[4097], 0),
            (&[(1 << 20) / ranks], 0),
            (&[3, 8, 16], 1),
            (&[3, 5, 7], 1),
            (&[9, 4], 1),
            (&[2, 3, 1], 2),
            (&[33, 512], 1),
        ] {
            add(Kind::AllGather(dim), dims, Lie::Whole);
        }
        for block in [&[0][..], &[1], &[7], &[4097], &[(1 << 20) / ranks], &[3, 5], &[8, 16]] {
            let dims: Vec<usize> = std::iter::once(ranks).chain(block.iter().copied()).collect();
            add(Kind::AllToAll, &dims, Lie::Whole);
        }
        add(Kind::AllToAll, &[ranks, 9], Lie::Tail);
        add(Kind::AllGather(0), &[9, 8], Lie::Tail);
        add(Kind::AllGather(1), &[12, 8], Lie::Turned);
        for n in [0, 1, 7, 16, 4097] {
            add(Kind::Shift(1), &[n], Lie::Whole);
            add(Kind::Reverse, &[n], Lie::Whole);
        }
        add(Kind::Shift(1), &[9, 8], Lie::Tail);
        add(Kind::Shift(ranks - 1), &[12, 5], Lie::Turned);
        add(Kind::Reverse, &[9, 8], Lie::Tail);
        add(Kind::AllToAll, &[24, ranks], Lie::Turned);
    }
    out
}

impl Case {
    /// Dims of the leaf.
    fn leaf(&self) -> Vec<usize> {
        let mut dims = self.dims.clone();
        if self.lie == Lie::Tail {
            dims[0] += 1;
        }
        dims
    }

    pub fn plan(&self, backend: &dyn Backend) -> Planned {
        let mut s = Sketch::default();
        let x = s.leaf(self.dtype, &self.leaf());
        let own = match self.lie {
            Lie::Whole => x,
            Lie::Tail => s.call("narrow", &[t(x), int(0), int(1), int(self.dims[0] as i64)]),
            Lie::Turned => s.call("transpose", &[t(x), int(0), int(1)]),
        };
        let (axis, n) = (self.axis as i64, self.ranks as i64);
        let code = |how| if self.widened { WIDENED } else { code(how) };
        let senders = |from: &dyn Fn(usize) -> usize| permutation(self.axis, (0..self.ranks).map(from));
        let y = match self.kind {
            Kind::AllReduce(how) => s.g.push(&ALL_REDUCE, &[own], &[axis, code(how)]),
            Kind::AllGather(dim) => s.g.push(&ALL_GATHER, &[own], &[axis, dim as i64, n]),
            Kind::AllToAll => s.g.push(&ALL_TO_ALL, &[own], &[axis, 0, n]),
            Kind::ReduceScatter(dim, how) => s.g.push(&REDUCE_SCATTER, &[own], &[axis, dim as i64, n, code(how)]),
            Kind::Shift(by) => {
                s.g.push(&COLLECTIVE_PERMUTE, &[own], &senders(&|at| (at + self.ranks - by) % self.ranks))
            }
            Kind::Reverse => s.g.push(&COLLECTIVE_PERMUTE, &[own], &senders(&|at| self.ranks - 1 - at)),
        };
        Planned::new(&s.g, &s.request(&[y.unwrap()]), backend)
    }

    /// What the device at `coordinate` sends: numbers of many magnitudes, so that the order of additions shows.
    pub fn data(&self, coordinate: usize) -> HostTensor {
        let dims = self.leaf();
        let mut x = (coordinate as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ dims.iter().product::<usize>() as u64;
        let sums = matches!(self.kind, Kind::AllReduce(Combine::Sum) | Kind::ReduceScatter(_, Combine::Sum));
        let value = |_| {
            x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let bits = x ^ (x >> 29);
            match self.dtype {
                DType::Bool => (bits >> 40 & 1) as f64,
                DType::U8 => (bits >> 40 & 255) as f64,
                DType::I32 | DType::I64 => (bits >> 32) as i32 as f64,
                _ if !sums && bits >> 40 & 31 == 0 => [f64::NAN, 0.0, -0.0, f64::INFINITY][(bits >> 50 & 3) as usize],
                _ if bits >> 40 & 255 == 1 => f64::INFINITY,
                // Times 2^-8 to 2^7, by its bits: a power of each element would take longer than the collectives.
                _ => ((bits >> 32) as i32 as f64 / 2_147_483_648.0) * f64::from_bits(((bits >> 20 & 15) + 1015) << 52),
            }
        };
        let values: Vec<f64> = (0..dims.iter().product()).map(value).collect();
        HostTensor::from_f64(self.dtype, Shape::of(&dims), &values)
    }

    pub fn mesh(&self) -> Mesh {
        Mesh::new(&[(self.axis, self.ranks)]).unwrap()
    }

    /// The results of CPU devices.
    pub fn on_cpu(&self) -> Vec<HostTensor> {
        let planned = self.plan(&Null);
        virtual_mesh::each(
            self.mesh(),
            0,
            |_| Box::new(Cpu::new(Some(1))),
            |mut rank| {
                rank.upload(1, &self.data(rank.device.at[self.axis as usize]));
                let roots = rank.run(&rank.load(&planned)).unwrap_or_else(|f| panic!("{}", f.error));
                rank.read(&roots[0]).unwrap()
            },
        )
    }
}

/// Panics unless two results have the same bits; a NaN that an addition made may have any.
pub fn same(case: &Case, rank: usize, got: &HostTensor, want: &HostTensor) {
    assert_eq!((got.shape, got.dtype), (want.shape, want.dtype), "{case:?} on {rank}");
    if got.bytes == want.bytes {
        return;
    }
    let size = got.dtype.size();
    for i in 0..want.numel() {
        let at = i * size..(i + 1) * size;
        let (g, w) = (&got.bytes[at.clone()], &want.bytes[at]);
        let nan = got.dtype.is_float() && got.get_f64(i).is_nan() && want.get_f64(i).is_nan();
        assert!(g == w || nan, "{case:?} on {rank}: element {i} is {g:?}, not {w:?}");
    }
}
