//! Compares drawings with tests/golden/plot (`PERILUNE_BLESS=1` updates it), and tests bad inputs.

use super::*;

const PLAIN: Look = Look { color: false, unicode: true };
const COLOR: Look = Look { color: true, unicode: true };
const ASCII: Look = Look { color: false, unicode: false };

fn same(name: &str, got: &str) {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/plot").join(name);
    if std::env::var_os("PERILUNE_BLESS").is_some() {
        std::fs::write(&path, got).expect("the golden folder can be written");
    }
    let want = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(got == want, "{name} differs; PERILUNE_BLESS=1 writes it anew. Got:\n{got}");
}

fn curve(f: impl Fn(f64) -> f64) -> Vec<(f64, f64)> {
    (0..=60).map(|i| (f64::from(i) * 5.0, f(f64::from(i) / 60.0))).collect()
}

/// Two curves, one with gaps, and two marks.
fn curves() -> Figure {
    let mut loss = curve(|t| 2.3 * (-4.0 * t).exp() + 0.05 * (40.0 * t).sin() + 0.1);
    for i in 20..25 {
        loss[i].1 = if i == 22 { f64::INFINITY } else { f64::NAN };
    }
    let valid = curve(|t| 2.4 * (-3.0 * t).exp() + 0.2);
    let marks = [(100.0, "step 100: lr 0.001 -> 0.0005 (line 12)"), (215.0, "step 215: <the> schedule & more")];
    let marks = marks.map(|(x, label)| Mark { x, label: label.into() }).to_vec();
    let series = vec![
        Series { faint: true, ..Series::new("loss", loss.clone()) },
        Series::new("loss", loss),
        Series::new("valid/loss", valid),
    ];
    Figure::Lines { title: "digits".into(), x_label: "step".into(), series, marks, log_y: false }
}

fn histogram() -> Figure {
    let values: Vec<f64> = (0..1000).map(|i| (f64::from(i) * 0.37).sin() + (f64::from(i) * 0.11).cos()).collect();
    Figure::histogram("weights", &[values, vec![f64::NAN, f64::INFINITY]].concat(), None)
}

fn heat() -> Figure {
    let mut values: Vec<f64> = (0..12 * 20).map(|i| (f64::from(i) * 0.05).sin() * f64::from(i % 20)).collect();
    values[45] = f64::NAN;
    Figure::heat("attention", 12, 20, values)
}

#[test]
fn plots_match_their_snapshots() {
    let mut one = curves();
    if let Figure::Lines { series, marks, log_y, .. } = &mut one {
        (*log_y, *marks) = (true, Vec::new());
        series.truncate(2);
    }
    same("curves.txt", &curves().text_with(80, 20, PLAIN));
    same("curves_ascii.txt", &curves().text_with(64, 16, ASCII));
    same("curves_color.txt", &curves().text_with(64, 12, COLOR));
    same("curve_log.txt", &one.text_with(64, 14, PLAIN));
    same("histogram.txt", &histogram().text_with(64, 14, PLAIN));
    same("histogram_ascii.txt", &histogram().text_with(64, 14, ASCII));
    same("heat.txt", &heat().text_with(64, 16, PLAIN));
    same("heat_color.txt", &heat().text_with(64, 16, COLOR));
    same("curves.svg", &curves().svg());
    same("histogram.svg", &histogram().svg());
}

#[test]
fn text_keeps_to_its_width_and_height() {
    for (cols, rows) in [(24, 6), (80, 24), (133, 40)] {
        for figure in [curves(), histogram(), heat()] {
            for look in [PLAIN, ASCII] {
                let text = figure.text_with(cols, rows, look);
                let marks = if matches!(figure, Figure::Lines { .. }) { 2 } else { 0 };
                let high = text.lines().count() - marks;
                assert!(high <= rows.max(8), "{high} lines for {rows}:\n{text}");
                // A legend is not truncated.
                for line in text.lines().filter(|l| !l.contains("loss")) {
                    assert!(line.chars().count() <= cols, "{} > {cols}: {line}\n{text}", line.chars().count());
                }
                assert!(look.unicode || text.is_ascii(), "{text}");
            }
        }
    }
}

/// Every kind of number that a tensor or a file may hold.
#[test]
fn bad_numbers_are_gaps_and_never_a_panic() {
    let odd = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -0.0, 5e-324, 1e-310, f64::MAX, f64::MIN, 1e300, -1.0];
    let mut sets: Vec<Vec<f64>> = vec![vec![], odd.to_vec(), vec![f64::NAN; 5]];
    sets.extend(odd.map(|v| vec![v]));
    sets.extend(odd.map(|v| vec![v; 7]));
    sets.extend(odd.map(|v| vec![1.0, v, 2.0]));
    for (k, values) in sets.iter().enumerate() {
        let points: Vec<(f64, f64)> = values.iter().enumerate().map(|(i, v)| (i as f64, *v)).collect();
        let swapped: Vec<(f64, f64)> = points.iter().map(|p| (p.1, p.0)).collect();
        let mark = Mark { x: 0.5, label: "edit".into() };
        let lines = |log_y: bool, points: &Vec<(f64, f64)>| Figure::Lines {
            title: String::new(),
            x_label: "x".into(),
            series: vec![Series::new("a", points.clone())],
            marks: vec![mark.clone()],
            log_y,
        };
        let figures = [
            lines(false, &points),
            lines(true, &points),
            lines(false, &swapped),
            Figure::histogram("h", values, None),
            Figure::heat("m", 1, values.len(), values.clone()),
            Figure::heat("m", values.len(), 1, values.clone()),
        ];
        for figure in figures {
            for look in [PLAIN, COLOR, ASCII] {
                figure.text_with(60, 12, look);
            }
            let svg = figure.svg();
            for bad in ["\"NaN", "NaN,", ",NaN", "\"inf", "inf,", ",inf"] {
                assert!(!svg.contains(bad), "{values:?}: {svg}");
            }
            // The slowest case.
            assert!(k > 3 || figure.png().starts_with(b"\x89PNG"));
        }
    }
}

/// A single number must be visible; an empty plot must state that it has no data.
#[test]
fn one_point_is_a_dot_and_no_data_is_reported() {
    let one = Figure::lines("", "step", vec![Series::new("a", vec![(1.0, 2.0)])]);
    let dots = one.text_with(40, 10, PLAIN).chars().filter(|c| ('\u{2801}'..='\u{28ff}').contains(c)).count();
    assert_eq!(dots, 1);
    assert!(one.svg().contains("<circle"));
    let none = Figure::lines("", "step", vec![Series::new("a", vec![(1.0, f64::NAN)])]);
    assert!(none.text_with(40, 10, PLAIN).contains("no data") && none.svg().contains("no data"));
}

/// A long series keeps its peaks although most of its points are omitted.
#[test]
fn a_long_series_is_thinned_but_keeps_its_peaks() {
    let mut points: Vec<(f64, f64)> = (0..200_000).map(|i| (f64::from(i), f64::from(i % 7))).collect();
    points[123_456].1 = 1000.0;
    let svg = Figure::lines("", "step", vec![Series::new("a", points)]).svg();
    assert!(svg.len() < 120_000, "{}", svg.len());
    // Only the peak is on the upper edge.
    let line = svg.lines().max_by_key(|l| l.len()).expect("there is a line");
    let ys = line.split(['"', ' ']).filter_map(|p| p.split_once(',')?.1.parse::<f64>().ok());
    let mut sorted: Vec<f64> = ys.collect();
    sorted.sort_by(f64::total_cmp);
    assert!(sorted[0] < sorted[1] - 200.0, "{:?}", &sorted[..2]);
}

/// The PNG has the colours of both curves.
#[test]
fn a_png_shows_the_curves() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("a.png");
    std::fs::write(&path, curves().png()).expect("it can be written");
    let image = perilune_data::image::load(perilune_policy::open_named(&path).expect("opened")).expect("it is a PNG");
    let count = |color: (u8, u8, u8)| image.bytes.chunks(3).filter(|p| (p[0], p[1], p[2]) == color).count();
    assert!(count(scene::PALETTE[0]) > 300 && count(scene::PALETTE[1]) > 300);
    assert_eq!(count(scene::PALETTE[2]), 0);
}
