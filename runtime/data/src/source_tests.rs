//! Tests prefetching over sources in memory: order, slices, errors, panics, cancellation.

use super::*;
use crate::gather::{Rows, TokenWindows};
use std::sync::mpsc;

fn samples(first: u64, rows: &[usize]) -> Samples {
    Samples { first, rows: rows.to_vec() }
}

fn message<T>(made: Result<T>) -> String {
    made.map(drop).map_err(|e| e.to_string()).expect_err("an error")
}

#[test]
fn rows_are_gathered_from_all_columns() -> Result<()> {
    let x = HostTensor::from_f64(DType::F16, Shape::of(&[3, 2]), &[0., 1., 2., 3., 4., 5.]);
    let y = HostTensor::from_i64(Shape::of(&[3]), &[7, 8, 9]);
    let mut ahead = Prefetcher::new(Rows::new(vec![x.clone(), y.clone()])?, Some(2))?;
    let got = ahead.take(&samples(4, &[2, 0, 2, 1]))?;
    assert_eq!((got.first, got.columns[0].shape.dims()), (4, &[4usize, 2][..]));
    assert_eq!(got.columns[0].to_f64(), [4., 5., 0., 1., 4., 5., 2., 3.]);
    assert_eq!(got.columns[1].to_i64(), [9, 7, 9, 8]);
    assert_eq!(ahead.take(&samples(0, &[]))?.columns[0].shape.dims(), &[0, 2]);
    assert!(message(ahead.take(&samples(0, &[0, 3]))).contains("sample 3: does not exist: there are 3"));

    let empty = HostTensor::from_i64(Shape::of(&[2, 0]), &[]);
    assert_eq!(
        Prefetcher::new(Rows::new(vec![empty.clone()])?, Some(1))?.take(&samples(0, &[1, 1]))?.columns[0].numel(),
        0
    );
    assert!(message(Rows::new(vec![x, empty])).contains("column 1: has 2 rows"));
    assert!(message(Rows::new(vec![HostTensor::from_i64(Shape::SCALAR, &[1])])).contains("without dims"));
    Ok(())
}

#[test]
fn windows_are_consecutive_tokens() -> Result<()> {
    let tokens = HostTensor::from_i64(Shape::of(&[5]), &[10, 11, 12, 13, 14]);
    let mut ahead = Prefetcher::new(TokenWindows::new(tokens.clone(), 3)?, Some(1))?;
    let got = ahead.take(&samples(0, &[2, 0]))?;
    assert_eq!(
        (got.columns[0].shape.dims(), got.columns[0].to_i64()),
        (&[2usize, 3][..], vec![12, 13, 14, 10, 11, 12])
    );
    assert!(message(ahead.take(&samples(0, &[3]))).contains("sample 3"));
    assert!(TokenWindows::new(tokens.clone(), 6).is_err() && TokenWindows::new(tokens, 0).is_err());
    Ok(())
}

/// More samples than one task makes, announced or not, on any number of threads, whole or in the slices of a mesh.
#[test]
fn batches_do_not_depend_on_threads_announcements_or_slices() -> Result<()> {
    let tokens = HostTensor::from_i64(Shape::of(&[5000]), &(0..5000).collect::<Vec<i64>>());
    let batch = |k: u64| samples(k * 1000, &(0..1000).map(|i| (k as usize * 1000 + i) * 7 % 4990).collect::<Vec<_>>());
    for threads in [1, 4] {
        let mut ahead = Prefetcher::new(TokenWindows::new(tokens.clone(), 4)?, Some(threads))?;
        for k in 0..6 {
            ahead.announce(&batch(k + 1));
            ahead.announce(&batch(k + 2));
            let whole = ahead.take(&batch(k))?;
            let want: Vec<i64> = batch(k).rows.iter().flat_map(|r| (0..4).map(move |i| *r as i64 + i)).collect();
            assert_eq!((whole.first, whole.columns[0].to_i64()), (k * 1000, want));
            let mut joined = Vec::new();
            for device in 0..3 {
                let part = batch(k).slice(device * 334..(device + 1) * 334);
                assert_eq!(part.first, k * 1000 + device as u64 * 334);
                joined.extend(ahead.take(&part)?.columns.remove(0).bytes);
            }
            assert!(joined == whole.columns[0].bytes, "batch {k}");
        }
    }
    Ok(())
}

/// Makes its index, after `gate` opens for it; row 1 fails, row 2 panics, row 3 writes too few bytes.
struct Scripted {
    columns: [Column; 1],
    gate: Option<Mutex<mpsc::Receiver<()>>>,
    made: Arc<Mutex<Vec<u64>>>,
}

impl Source for Scripted {
    fn rows(&self) -> usize {
        4
    }

    fn columns(&self) -> &[Column] {
        &self.columns
    }

    fn write(&self, sample: Sample, columns: &mut [Vec<u8>]) -> Result<()> {
        if let Some(gate) = &self.gate {
            gate.lock().unwrap().recv().expect("the gate");
        }
        self.made.lock().unwrap().push(sample.index);
        match sample.row {
            1 => return Err(Error::argument(format!("index {}", sample.index), "is planted")),
            2 => panic!("planted"),
            3 => return Ok(()),
            _ => columns[0].extend_from_slice(&(sample.index as i64).to_le_bytes()),
        }
        Ok(())
    }
}

fn scripted(gate: Option<mpsc::Receiver<()>>) -> (Scripted, Arc<Mutex<Vec<u64>>>) {
    let made = Arc::new(Mutex::new(Vec::new()));
    let columns = [Column { dtype: DType::I64, shape: Shape::SCALAR }];
    (Scripted { columns, gate: gate.map(Mutex::new), made: made.clone() }, made)
}

#[test]
fn the_first_error_by_place_belongs_to_its_batch() -> Result<()> {
    let mut ahead = Prefetcher::new(scripted(None).0, Some(4))?;
    for _ in 0..20 {
        ahead.announce(&samples(10, &[0, 1, 2, 1]));
        ahead.announce(&samples(20, &[0, 2, 1, 3]));
        assert!(message(ahead.take(&samples(10, &[0, 1, 2, 1]))).contains("index 11: is planted"));
        assert!(message(ahead.take(&samples(20, &[0, 2, 1, 3]))).contains("sample 2"));
        assert!(message(ahead.take(&samples(30, &[0, 3]))).contains("sample 3"));
        assert_eq!(ahead.take(&samples(u64::MAX, &[0, 0]))?.columns[0].to_i64(), [-1, 0]);
    }
    Ok(())
}

/// One thread, held at the first sample of a batch that is then dropped: it makes no other sample of it.
#[test]
fn a_change_of_order_cancels_what_was_announced() -> Result<()> {
    let (open, gate) = mpsc::channel();
    let (source, made) = scripted(Some(gate));
    let mut ahead = Prefetcher::new(source, Some(1))?;
    ahead.announce(&samples(100, &[0; 50]));
    ahead.announce(&samples(200, &[0; 50]));
    let opener = std::thread::spawn(move || {
        (0..100).try_for_each(|_| {
            std::thread::sleep(std::time::Duration::from_millis(20));
            open.send(())
        })
    });
    assert_eq!(ahead.take(&samples(0, &[0, 0]))?.columns[0].to_i64(), [0, 1]);
    let made = made.lock().unwrap().clone();
    assert!(made.iter().filter(|i| **i >= 100).count() <= 1, "{made:?}");
    drop(ahead);
    let _ = opener.join();
    Ok(())
}

#[test]
fn a_count_of_threads_beyond_the_limit_is_refused() -> Result<()> {
    for threads in [0, MAX_THREADS + 1] {
        assert!(message(Prefetcher::new(scripted(None).0, Some(threads))).contains("must be from 1 to 1024"));
    }
    Ok(())
}

/// A batch whose file does not answer: the wait ends soon after an interrupt, and the batch is taken later.
#[test]
fn an_interrupt_ends_the_wait_for_a_batch() -> Result<()> {
    let (open, gate) = mpsc::channel();
    let (source, made) = scripted(Some(gate));
    let interrupt = perilune_core::Interrupt::default();
    let mut ahead = Prefetcher::new(source, Some(1))?.interrupted_by(interrupt.clone());
    let asks = std::thread::spawn({
        let interrupt = interrupt.clone();
        move || {
            std::thread::sleep(std::time::Duration::from_millis(50));
            interrupt.request();
        }
    });
    let begun = std::time::Instant::now();
    let taken = ahead.take(&samples(7, &[0]));
    assert!(matches!(taken, Err(Error::Interrupted)));
    assert!(begun.elapsed() < std::time::Duration::from_secs(5));
    let _ = asks.join();
    interrupt.clear();
    open.send(()).expect("the gate");
    assert_eq!(ahead.take(&samples(7, &[0]))?.columns[0].to_i64(), [7]);
    assert_eq!(*made.lock().unwrap(), [7]);
    Ok(())
}
