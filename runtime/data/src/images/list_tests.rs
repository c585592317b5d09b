//! Tests lists of images: labels of each kind, paths, and errors with the place of the record.

use super::*;
use crate::images::{Crop, Images};
use crate::records::{LineFormat, Lines, List, MEMORY, Opening, Record};
use crate::source::{HostBatch, Prefetcher, Samples};
use perilune_core::{DType, Interrupt};
use perilune_policy::Policy;

const JPEG: &[u8] = include_bytes!("../../../../tests/golden/images/folder/boat/plain.jpg");

struct Place(tempfile::TempDir, Arc<Policy>);

impl Place {
    fn new(files: &[&str]) -> Place {
        let dir = tempfile::tempdir().expect("tempdir");
        for name in files {
            let at = dir.path().join("in").join(name);
            std::fs::create_dir_all(at.parent().expect("parent")).expect("create");
            std::fs::write(at, JPEG).expect("write");
        }
        let policy = Policy::builder().allow_read(&dir.path().join("in")).expect("a root").build();
        Place(dir, policy)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join("in").join(name)
    }

    fn lines(&self, text: &str) -> Arc<dyn Dataset> {
        let at = self.path("list.jsonl");
        std::fs::write(&at, text).expect("write");
        let (opener, interrupt) = (self.1.clone(), Interrupt::default());
        let opening = Opening { opener, cache: None, interrupt: &interrupt, observe: &mut |_| () };
        Arc::new(Lines::open(&[at], LineFormat::Json, opening).expect("opened"))
    }

    fn open(&self, records: Arc<dyn Dataset>, change: impl FnOnce(&mut ListOptions)) -> Result<ImageFiles> {
        let mut options = ListOptions { path: "file".into(), recipe: self.path(""), ..ListOptions::default() };
        change(&mut options);
        ImageFiles::of_records(self.1.clone(), records, &options, &Scan::new(Some(2), Interrupt::default())?)
    }

    /// The list of these lines with the label `c` as y.
    fn labelled(&self, text: &str, classes: Option<&[&str]>) -> Result<ImageFiles> {
        let classes = classes.map(|all| all.iter().map(|s| s.to_string()).collect());
        self.open(self.lines(text), |o| o.labels = vec![("y".into(), "c".into(), classes)])
    }

    fn refused(&self, text: &str) -> String {
        self.labelled(text, None).map(drop).map_err(|e| e.to_string()).expect_err("refused")
    }
}

fn batch(files: ImageFiles, rows: &[usize]) -> HostBatch {
    let images = Images::new(Arc::new(files), 8, Crop::Center { resize: 9 }).expect("images");
    let mut reader = Prefetcher::new(images, Some(2)).expect("reader");
    reader.take(&Samples { first: 0, rows: rows.to_vec() }).expect("batch")
}

#[test]
fn labels_of_each_kind_are_columns() {
    let p = Place::new(&["a.jpg", "b/c.jpg"]);
    let list = |first: &str, second: &str, third: &str| {
        let lines = [("a.jpg", first), ("b/c.jpg", second), ("./b/../a.jpg", third)];
        lines.iter().map(|(file, c)| format!("{{\"file\": \"{file}\", \"c\": {c}, \"z\": 0}}\n")).collect::<String>()
    };
    for (labels, dtype, dims, want) in [
        (["3", "-1", "9007199254740993"], DType::I64, &[3][..], &[3.0, -1.0, 9007199254740993i64 as f64][..]),
        (["1", "2.5", "3"], DType::F32, &[3], &[1.0, 2.5, 3.0]),
        (["true", "false", "true"], DType::Bool, &[3], &[1.0, 0.0, 1.0]),
        (["\"dog\"", "\"cat\"", "\"dog\""], DType::I64, &[3], &[1.0, 0.0, 1.0]),
        (["[1, 2]", "[3, 4]", "[5, 6.5]"], DType::F32, &[3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.5]),
        (["[[1], [2]]", "[[3], [4]]", "[[5], [6]]"], DType::I64, &[3, 2, 1], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
        (["[]", "[\"sea\", \"air\", \"sea\"]", "[\"sea\"]"], DType::F32, &[3, 2], &[0.0, 0.0, 1.0, 1.0, 0.0, 1.0]),
    ] {
        let [a, b, c] = labels;
        let files = p.labelled(&list(a, b, c), None).expect("opened");
        assert_eq!((files.len(), files.path(1)), (3, p.path("b/c.jpg")));
        let y = batch(files, &[0, 1, 2]).columns.remove(1);
        assert_eq!((y.dtype, y.shape.dims(), &y.to_f64()[..]), (dtype, dims, want), "{labels:?}");
    }
    let exact = p.labelled(&list("9007199254740993", "0", "0"), None).expect("opened");
    assert_eq!(batch(exact, &[0]).columns[1].get_i64(0), 9007199254740993);
    // Classes of the training list have its ids; ids of classes are checked.
    let names = |files: ImageFiles| (files.labels()[0].classes().to_vec(), files.labels()[0].ids(0));
    let given = p.labelled(&list("\"dog\"", "\"cat\"", "\"cat\""), Some(&["owl", "dog", "cat"])).expect("opened");
    assert_eq!(names(given), (vec!["owl".into(), "dog".into(), "cat".into()], vec![1]));
    let ids = p.labelled(&list("1", "0", "1"), Some(&["owl", "dog"])).expect("opened");
    assert_eq!(names(ids), (vec!["owl".into(), "dog".into()], vec![1]));
    for (label, classes, needle) in [
        (
            "\"dgo\"",
            &["owl", "dog"][..],
            "list.jsonl:1: the class 'dgo' is none of the 2 classes asked for\n  hint: did you mean 'dog'?",
        ),
        ("2", &["owl", "dog"], "the label 'c' is 2, and there are 2 classes"),
        ("0.5", &["owl"], "the label 'c' is f32 and no class"),
        ("\"owl\"", &["owl", "owl"], "have 'owl' twice"),
    ] {
        let text = p.labelled(&list(label, label, label), Some(classes)).map_err(|e| e.to_string()).expect_err(label);
        assert!(text.contains(needle), "{text}");
    }
}

#[test]
fn labels_that_differ_are_refused_with_their_line() {
    let p = Place::new(&["a.jpg"]);
    for (first, second, needle) in [
        ("1", "\"a\"", "the label 'c' is a string, and one i64 in the first record"),
        ("\"a\"", "1", "the label 'c' is an integer, and the name of a class in the first record"),
        ("[1, 2]", "[1]", "the label 'c' is 1 i64, and 2 i64 in the first record"),
        ("true", "1", "the label 'c' is i64, and one bool in the first record"),
        ("[\"a\"]", "\"a\"", "the label 'c' is a string, and a list of names of classes in the first record"),
        ("[\"a\"]", "[\"a\", 1]", "the label 'c' lists names and an integer"),
        ("[]", "[1]", "the label 'c' is a list, and an empty list in the first record"),
        ("1", "null", "the label 'c' is null"),
        ("1", "{\"d\": 1}", "the label 'c' is a map"),
        ("1", "[1, \"x\"]", "the label 'c' is a list"),
    ] {
        let text =
            p.refused(&format!("{{\"file\": \"a.jpg\", \"c\": {first}}}\n{{\"file\": \"a.jpg\", \"c\": {second}}}\n"));
        assert!(
            text.contains(needle) && text.contains("list.jsonl:2: ") && text.contains("hint: "),
            "{needle}: {text}"
        );
    }
    let text = p.refused("{\"file\": \"a.jpg\", \"c\": []}\n");
    assert!(text.contains("'c' is an empty list in every record"), "{text}");
    let text = p.refused("{\"file\": \"a.jpg\", \"d\": 1}\n");
    assert!(text.contains("list.jsonl:1: the record has no field 'c'"), "{text}");
}

#[test]
fn paths_are_checked_with_their_line() {
    let p = Place::new(&["a.jpg", "set/b.jpg", "set/c.gif"]);
    std::fs::write(p.0.path().join("secret.jpg"), JPEG).expect("write");
    std::fs::create_dir(p.path("set/d.jpg")).expect("create");
    for (path, needle) in [
        ("\"b.jpg\"", "list.jsonl:2: there is no image 'b.jpg' in"),
        ("\"a.jpeg\"", "did you mean 'a.jpg'?"),
        ("\"none/a.jpg\"", "list.jsonl:2: there is no image 'a.jpg' in"),
        ("\"set/c.gif\"", "c.gif: image: of this format"),
        ("\"set/d.jpg\"", "d.jpg"),
        ("\"set/\"", "list.jsonl:2: the path 'set/' names no file"),
        ("\"..\"", "names no file"),
        ("\"\"", "names no file"),
        ("\"https://example.org/a.jpg\"", "is an address"),
        ("\"../secret.jpg\"", "--allow-read="),
        ("7", "list.jsonl:2: the path of the image, 'file', is an integer"),
        ("{\"bytes\": 1}", "images inside of a table are not read"),
    ] {
        let text = p.refused(&format!("{{\"file\": \"set/b.jpg\", \"c\": 1}}\n{{\"file\": {path}, \"c\": 1}}\n"));
        assert!(text.contains(needle), "{path}: {text}");
    }
    let absolute = format!("{{\"file\": {:?}, \"c\": 1}}\n", p.0.path().join("secret.jpg"));
    assert!(p.refused(&absolute).contains("--allow-read="));
    // Of several missing files, the first record's is the error, whatever the order of folders.
    let text = p.refused(
        "{\"file\": \"set/b.jpg\", \"c\": 1}\n{\"file\": \"no.jpg\", \"c\": 1}\n{\"file\": \"set/no.jpg\", \"c\": 1}\n",
    );
    assert!(text.contains("list.jsonl:2: "), "{text}");
}

#[test]
fn relative_paths_start_at_the_list_or_the_folder_or_the_recipe() {
    let p = Place::new(&["a.jpg", "set/a.jpg"]);
    let lines = || p.lines("{\"file\": \"a.jpg\"}\n");
    assert_eq!(p.open(lines(), |_| ()).expect("opened").path(0), p.path("a.jpg"));
    let within = |o: &mut ListOptions| o.folder = Some(p.path("set"));
    let files = p.open(lines(), within).expect("opened");
    assert_eq!((files.path(0), files.root()), (p.path("set/a.jpg"), &*p.path("set")));
    use perilune_policy::FileList;
    assert_eq!(files.file(0).0, Path::new("a.jpg"));
    let record = |file: &str| Record { fields: vec![("file".into(), Value::Text(file.into()))] };
    let list =
        |files: &[&str]| -> Arc<dyn Dataset> { Arc::new(List::new(MEMORY, files.iter().map(|f| record(f)).collect())) };
    let files = p.open(list(&["set/a.jpg", "a.jpg"]), |_| ()).expect("opened");
    assert_eq!((files.path(0), files.labels().len(), files.file(0).0), (p.path("set/a.jpg"), 0, "set/a.jpg".into()));
    assert_eq!(batch(files, &[1]).columns.len(), 1);
    let text = p.open(list(&[]), |_| ()).map_err(|e| e.to_string()).expect_err("empty");
    assert!(text.contains("has no records"), "{text}");
    let mixed = Arc::new(crate::records::stages::Shuffle::new(lines(), 1));
    let text = p.open(mixed, |_| ()).map_err(|e| e.to_string()).expect_err("shuffled");
    assert!(text.contains("shuffle the images"), "{text}");
}
