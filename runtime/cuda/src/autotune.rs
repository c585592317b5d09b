//! Autotunes cuBLASLt: times its algorithms and chooses the fastest one that does not change bits.
//!
//! cuBLASLt orders its algorithms by a heuristic. Another algorithm is often a few percent faster, but may add in
//! another order; timing noise would then change results from run to run. Most algorithms add in the same order: those
//! with other tile shapes do, split-K ones do not. So the search runs each algorithm on the same random matrices and
//! times only those whose result has the same bits as that of the first one. Skipping a search, for example for lack of
//! memory, does not change results either. `PERILUNE_TUNE=1` accepts any algorithm and stores the choice on disk, so
//! another machine may then get other bits. `PERILUNE_TUNE=0` uses the first algorithm.

use crate::blas::{Addresses, Blas, Gemm};
use crate::driver::{Address, Device, Event};
use cudarc::cublaslt::sys;
use half::{bf16, f16};
use perilune_core::DType;
use perilune_core::env_flags::{self, Setting};
use perilune_core::error::Result;
use std::path::{Path, PathBuf};

/// Number of pieces of a result that are compared, and bytes per piece.
const PIECES: usize = 16;
const PIECE: usize = 64 << 10;
/// Bytes of random numbers that matrices are filled with, repeatedly.
const NOISE: usize = 1 << 20;
/// Number of timed runs, of which the fastest counts. An algorithm slower than the best by this factor is not run
/// again.
const RUNS: usize = 3;
const HOPELESS: f64 = 1.1;
/// An algorithm replaces the first one only if its time is below this fraction.
const WORTH: f64 = 0.99;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Search {
    Off,
    SameBits,
    Any,
}

impl Search {
    pub fn of_env() -> Search {
        Search::of(env_flags::TUNE.setting())
    }

    fn of(setting: Option<Setting>) -> Search {
        match setting {
            Some(Setting::Off) => Search::Off,
            Some(_) => Search::Any,
            None => Search::SameBits,
        }
    }
}

/// Device memory in which a product's algorithms are timed.
pub struct Trial {
    pub search: Search,
    pub dtype: DType,
    /// The whole range.
    pub base: Address,
    pub nbytes: usize,
    /// The addresses of the operands, and the bytes of the result.
    pub at: Addresses,
    pub written: usize,
}

impl Trial {
    /// Fills the memory with numbers in [-1, 1), because algorithms take longer on them than on zeros.
    fn fill(&self, device: &Device) -> Result<()> {
        let block = noise(self.dtype, self.nbytes.min(NOISE));
        device.upload(self.base, &block)?;
        let mut done = block.len();
        while done < self.nbytes {
            let n = done.min(self.nbytes - done);
            device.copy(self.base, self.base + done as u64, n)?;
            done += n;
        }
        Ok(())
    }

    fn sample(&self, device: &Device) -> Result<Vec<u8>> {
        let piece = PIECE.min(self.written);
        let mut out = vec![0; PIECES * piece];
        for (k, bytes) in out.chunks_exact_mut(piece.max(1)).enumerate() {
            let from = (self.written - piece) / (PIECES - 1) * k;
            device.download(self.at.out + from as u64, bytes)?;
        }
        Ok(out)
    }

    /// Times the candidates and selects the fastest one that is allowed to replace the first.
    pub fn pick(&self, blas: &Blas, gemm: &mut Gemm, candidates: &[sys::cublasLtMatmulAlgo_t]) -> Result<()> {
        let device = &blas.device;
        self.fill(device)?;
        let (mut best, mut choice, mut bits) = (f64::INFINITY, gemm.algo, None);
        for algo in candidates {
            gemm.algo = *algo;
            if blas.run(gemm, self.at).is_err() {
                continue;
            }
            if self.search == Search::SameBits {
                let sample = self.sample(device)?;
                if *bits.get_or_insert_with(|| sample.clone()) != sample {
                    continue;
                }
            }
            let mut fastest = f64::INFINITY;
            for _ in 0..RUNS {
                let start = Event::record(device)?;
                blas.run(gemm, self.at)?;
                let end = Event::record(device)?;
                device.synchronize()?;
                fastest = fastest.min(end.since(&start)?);
                if fastest > best * HOPELESS {
                    break;
                }
            }
            if fastest < best * WORTH {
                (best, choice) = (fastest, *algo);
            }
        }
        gemm.algo = choice;
        Ok(())
    }
}

/// Returns numbers in [-1, 1) to fill any pair of matrices with: SplitMix64 (Steele, Lea and Flood, 2014).
fn noise(dtype: DType, nbytes: usize) -> Vec<u8> {
    let mut state = 0u64;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    };
    let mut out = Vec::with_capacity(nbytes + 8);
    while out.len() < nbytes {
        match dtype {
            DType::F64 => out.extend(next().to_le_bytes()),
            DType::BF16 => out.extend(bf16::from_f64(next()).to_le_bytes()),
            DType::F16 => out.extend(f16::from_f64(next()).to_le_bytes()),
            _ => out.extend((next() as f32).to_le_bytes()),
        }
    }
    out.truncate(nbytes);
    out
}

/// Results of searches on disk, one file per product. An algorithm is stored as plain words, which NVIDIA permits for
/// the same version of the library. The file name is a hash of that version, the device, the driver and the product.
pub struct Table {
    /// `None`: nothing is stored.
    pub folder: Option<PathBuf>,
    /// Another folder, which is only read.
    pub shared: Option<PathBuf>,
    pub machine: String,
}

const WORDS: usize = size_of::<sys::cublasLtMatmulAlgo_t>() / 8;

impl Table {
    pub fn key(&self, product: &str) -> String {
        let text = format!("{} {product}", self.machine);
        blake3::hash(text.as_bytes()).to_hex()[..32].to_string()
    }

    pub fn get(&self, key: &str) -> Option<sys::cublasLtMatmulAlgo_t> {
        [&self.folder, &self.shared].into_iter().flatten().find_map(|folder| Table::get_in(folder, key))
    }

    fn get_in(folder: &Path, key: &str) -> Option<sys::cublasLtMatmulAlgo_t> {
        let bytes = std::fs::read(folder.join(key)).ok()?;
        // The words and a hash of them: a truncated or changed file is treated as missing.
        let (words, hash) = bytes.split_at_checked(WORDS * 8)?;
        if blake3::hash(words).as_bytes() != hash {
            return None;
        }
        let mut algo = sys::cublasLtMatmulAlgo_t { data: [0; WORDS] };
        for (to, from) in algo.data.iter_mut().zip(words.chunks_exact(8)) {
            *to = u64::from_le_bytes(from.try_into().ok()?);
        }
        Some(algo)
    }

    /// If the folder cannot be written, later runs only repeat the search.
    pub fn put(&self, key: &str, algo: &sys::cublasLtMatmulAlgo_t) {
        let Some(folder) = &self.folder else { return };
        let words: Vec<u8> = algo.data.iter().flat_map(|w| w.to_le_bytes()).collect();
        let bytes = [&words[..], blake3::hash(&words).as_bytes()].concat();
        let part = folder.join(format!("{key}.{}.part", std::process::id()));
        let write = || -> std::io::Result<()> {
            std::fs::create_dir_all(folder)?;
            std::fs::write(&part, bytes)?;
            std::fs::rename(&part, folder.join(key))
        };
        let _ = write();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn autotuning_is_enabled_only_by_an_on_value() {
        let of = [None, Some(Setting::Off), Some(Setting::On)].map(Search::of);
        assert_eq!(of, [Search::SameBits, Search::Off, Search::Any]);
    }

    #[test]
    fn algorithms_survive_the_disk_and_a_damaged_file_is_none() {
        let dir = std::env::temp_dir().join(format!("perilune-products-{}", std::process::id()));
        let table = |machine: &str| Table { folder: Some(dir.clone()), shared: None, machine: machine.into() };
        let names = [table("a").key("p"), table("a").key("q"), table("b").key("p")];
        assert!(names[0] != names[1] && names[0] != names[2] && names[1] != names[2], "{names:?}");
        let mut algo = sys::cublasLtMatmulAlgo_t { data: [0; WORDS] };
        algo.data[0] = 77;
        algo.data[WORDS - 1] = u64::MAX - 3;
        let t = table("a");
        assert!(t.get(&names[0]).is_none());
        t.put(&names[0], &algo);
        assert_eq!(t.get(&names[0]).map(|a| a.data), Some(algo.data));
        let path = dir.join(&names[0]);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[3] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        assert!(t.get(&names[0]).is_none());
        std::fs::write(&path, &bytes[..20]).unwrap();
        assert!(t.get(&names[0]).is_none());
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn noise_is_finite_and_never_the_same_again() {
        for (dtype, size) in [(DType::BF16, 2), (DType::F16, 2), (DType::F32, 4), (DType::F64, 8)] {
            let bytes = noise(dtype, 1000 * size + 1);
            assert_eq!(bytes.len(), 1000 * size + 1);
            let value = |c: &[u8]| match dtype {
                DType::BF16 => bf16::from_le_bytes([c[0], c[1]]).to_f64(),
                DType::F16 => f16::from_le_bytes([c[0], c[1]]).to_f64(),
                DType::F32 => f64::from(f32::from_le_bytes(c.try_into().unwrap())),
                _ => f64::from_le_bytes(c.try_into().unwrap()),
            };
            let values: Vec<f64> = bytes.chunks_exact(size).map(value).collect();
            assert!(values.iter().all(|v| (-1.0..=1.0).contains(v)));
            let distinct: std::collections::BTreeSet<u64> = values.iter().map(|v| v.to_bits()).collect();
            assert!(distinct.len() > 400, "{dtype:?}: {}", distinct.len());
        }
    }
}
