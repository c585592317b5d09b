//! Collects what training comes to, losses, metrics, evaluations and States, and compares it with that of another mesh.

use perilune_core::HostTensor;
use perilune_lua::Run;

/// The values of a run in order, and its States at the end, by name.
pub struct Outcome {
    pub values: Vec<(String, f64)>,
    pub states: Vec<(String, HostTensor)>,
}

impl Outcome {
    /// Takes so many steps, and evaluates two batches of each split.
    pub fn of(run: &Run, steps: usize) -> Outcome {
        let mut values = Vec::new();
        for _ in 0..steps {
            let numbers = run.step().and_then(|step| run.read(&step)).unwrap_or_else(|e| panic!("{e}"));
            values.push(("loss".into(), numbers.loss));
            values.extend(numbers.metrics);
        }
        for split in run.evaluated_splits() {
            values.extend(run.evaluate_batches(&split, Some(2)).unwrap_or_else(|e| panic!("{e}")));
        }
        let mut states = Vec::new();
        run.each_state(|path, t| states.push((path, t))).unwrap();
        Outcome { values, states }
    }

    /// The largest difference of a value or an element, relative to values above 1, and where it is. NaN equals NaN only.
    pub fn difference(&self, other: &Outcome) -> (f64, String) {
        let mut worst = (0.0, String::new());
        let mut compare = |name: &str, a: f64, b: f64| {
            let off = (a - b).abs() / a.abs().max(1.0);
            if off > worst.0 || off.is_nan() && !(a.is_nan() && b.is_nan()) {
                worst = (if off.is_nan() { f64::INFINITY } else { off }, format!("{name}: {a} and {b}"));
            }
        };
        assert_eq!((self.values.len(), self.states.len()), (other.values.len(), other.states.len()));
        for ((name, a), (_, b)) in self.values.iter().zip(&other.values) {
            compare(name, *a, *b);
        }
        for ((path, a), (name, b)) in self.states.iter().zip(&other.states) {
            assert_eq!((path, a.shape, a.dtype), (name, b.shape, b.dtype));
            (0..a.numel()).for_each(|i| compare(path, a.get_f64(i), b.get_f64(i)));
        }
        worst
    }

    /// Whether every value and every element of a State is a finite number.
    pub fn is_finite(&self) -> bool {
        let state = |t: &HostTensor| (0..t.numel()).all(|i| t.get_f64(i).is_finite());
        self.values.iter().all(|v| v.1.is_finite()) && self.states.iter().all(|(_, t)| state(t))
    }
}
