//! Writes indented CUDA text.

/// Text of a function body under construction.
#[derive(Clone, Debug)]
pub struct Writer {
    out: String,
    depth: usize,
}

impl Default for Writer {
    fn default() -> Writer {
        Writer { out: String::new(), depth: 1 }
    }
}

impl Writer {
    pub fn line(&mut self, line: impl AsRef<str>) {
        for _ in 0..self.depth {
            self.out.push_str("    ");
        }
        self.out.push_str(line.as_ref());
        self.out.push('\n');
    }

    /// A line that opens a block: `head {`.
    pub fn open(&mut self, head: impl AsRef<str>) {
        let head = head.as_ref();
        self.line(if head.is_empty() { "{".to_string() } else { format!("{head} {{") });
        self.depth += 1;
    }

    pub fn close(&mut self) {
        self.depth -= 1;
        self.line("}");
    }

    /// Runs `f` and removes the lines it wrote, for insertion elsewhere.
    pub fn aside<T>(this: &mut T, text: impl Fn(&mut T) -> &mut Writer, f: impl FnOnce(&mut T)) -> Vec<String> {
        let at = text(this).out.len();
        f(this);
        let lines = text(this).out.split_off(at);
        lines.lines().map(|l| l.trim_start().to_string()).collect()
    }

    /// Opens a fully unrolled loop.
    pub fn unrolled(&mut self, var: &str, count: usize) {
        self.line("#pragma unroll");
        self.open(format!("for (int {var} = 0; {var} < {count}; {var}++)"));
    }

    pub fn finish(self) -> String {
        self.out
    }
}
