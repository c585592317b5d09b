//! Reads a PTX module statement by statement and prints it with checks (PTX ISA, "Directives" and "Abstracting the ABI").
//!
//! What NVRTC writes is known, but `asm` in the recipe's source can put any text anywhere. So every statement is read by the same rules,
//! wherever it stands, and a directive or instruction that is not known refuses the kernel.

use super::access::{Act, Class, classify, element};
use super::checks::{self, Access, Place, RESERVED, STOP_STATE, Variable};
use super::lexer::{Token, print, tokens};
use super::{Guard, Layout, Refusal};
use std::collections::{HashMap, HashSet};

type Read<T> = Result<T, String>;

/// See [`super::rewrite`].
pub fn rewrite(ptx: &str, entry: &str, file: &str, layout: Layout, guard: Guard) -> Result<String, Refusal> {
    let refuse = |line: u32, message: String| Refusal { line, message };
    let tokens = tokens(ptx).map_err(|message| refuse(0, message))?;
    if tokens.iter().any(|t| t.text.contains(RESERVED)) {
        return Err(refuse(0, format!("it has a name with {RESERVED}, which the checks use")));
    }
    let facts = Facts::of(&tokens, entry, file, &layout).map_err(|message| refuse(0, message))?;
    let mut rewriter = Rewriter { tokens: &tokens, at: 0, out: String::new(), line: 0, facts: &facts, layout, guard };
    match rewriter.module() {
        Ok(()) => Ok(rewriter.out),
        Err(message) => Err(refuse(rewriter.line, message)),
    }
}

/// What is known of a module before it is rewritten.
struct Facts {
    /// The numbers of the files that are the recipe's text.
    files: HashSet<String>,
    /// Functions with a body.
    functions: HashSet<String>,
    /// Variables in global memory.
    variables: Vec<Variable>,
    /// The parameters of the kernel.
    params: Vec<String>,
}

impl Facts {
    fn of(tokens: &[Token], entry: &str, file: &str, layout: &Layout) -> Read<Facts> {
        let mut facts =
            Facts { files: HashSet::new(), functions: HashSet::new(), variables: Vec::new(), params: Vec::new() };
        let (mut at, mut depth, mut entries) = (0, 0usize, 0);
        while let Some(token) = tokens.get(at) {
            match token.text {
                "{" => depth += 1,
                "}" => depth = depth.saturating_sub(1),
                ".file" => {
                    if let [number, name, ..] = &tokens[at + 1..]
                        && name.text.trim_matches('"').rsplit('/').next() == Some(file)
                    {
                        facts.files.insert(number.text.into());
                    }
                }
                ".func" | ".entry" if depth == 0 => {
                    let header = Header::read(&tokens[at..])?;
                    if header.is_defined {
                        facts.functions.insert(header.name.into());
                    }
                    if token.text == ".entry" {
                        entries += 1;
                        if header.name != entry || entries > 1 {
                            return Err(format!("it defines the kernel {}, and may define one only", header.name));
                        }
                        facts.params = header.params;
                    }
                    at += header.tokens;
                    continue;
                }
                ".global" if depth == 0 => facts.variables.push(variable(&tokens[at..])?),
                _ => {}
            }
            at += 1;
        }
        let taken = |v: &Variable| v.name.starts_with('%') || facts.params.contains(&v.name);
        if let Some(v) = facts.variables.iter().find(|v| taken(v)) {
            return Err(format!("its variable {} has the name of something else", v.name));
        }
        if facts.params.len() != layout.params() {
            return Err(format!("it has {} parameters, and its launch passes {}", facts.params.len(), layout.params()));
        }
        Ok(facts)
    }

    /// Refuses a declaration in a function of a name that the checks use: it would stand for something else there. `tab<9>` declares
    /// `tab0` to `tab8`.
    fn declares(&self, list: &[Token]) -> Read<()> {
        for (k, token) in list.iter().enumerate().filter(|(_, t)| t.is_word()) {
            let is_range = list.get(k + 1).is_some_and(|t| t.text == "<");
            let is_same = |name: &str| match name.strip_prefix(token.text) {
                Some("") => true,
                Some(rest) => is_range && rest.bytes().all(|b| b.is_ascii_digit()),
                None => false,
            };
            let mut names =
                self.variables.iter().map(|v| v.name.as_str()).chain(self.params.iter().map(String::as_str));
            if names.any(is_same) {
                return Err(format!("it declares {} twice", token.text));
            }
        }
        Ok(())
    }
}

/// The beginning of a function, up to its `{` or `;`.
struct Header<'a> {
    name: &'a str,
    params: Vec<String>,
    is_defined: bool,
    /// Its length, without the `{` or `;`.
    tokens: usize,
}

impl<'a> Header<'a> {
    fn read(tokens: &[Token<'a>]) -> Read<Header<'a>> {
        let end = tokens.iter().position(|t| matches!(t.text, "{" | ";")).ok_or("a function has no body")?;
        let (mut name, mut params, mut depth, mut groups) = (None, Vec::new(), 0usize, 0);
        for (k, token) in tokens[..end].iter().enumerate().skip(1) {
            match token.text {
                "(" => depth += 1,
                ")" => {
                    depth = depth.checked_sub(1).ok_or("a function's parentheses do not match")?;
                    groups += 1;
                }
                word if depth == 0 && name.is_none() && token.is_word() && !word.starts_with('.') => {
                    name = Some(word);
                    groups = 0;
                }
                // The last word of a parameter, before `[`, `,` or `)`.
                word if depth == 1 && name.is_some() && groups == 0 && token.is_word() && !word.starts_with('.') => {
                    if matches!(tokens[k + 1].text, "[" | "," | ")") {
                        params.push(word.to_string());
                    }
                }
                _ => {}
            }
        }
        let name = name.ok_or("a function has no name")?;
        // The size of an array is a word too, but stands before a `]`.
        Ok(Header { name, params, is_defined: tokens[end].text == "{", tokens: end })
    }
}

/// Reads `.global .align 4 .b8 table[40]`, up to an initializer or the end.
fn variable(tokens: &[Token]) -> Read<Variable> {
    let (mut name, mut size, mut lanes) = (None, None, 1u64);
    let mut words = tokens.iter().skip(1);
    let unknown = || "it has a variable in global memory of unknown size".to_string();
    let mut count = 1u64;
    while let Some(token) = words.next() {
        match token.text {
            ".align" => drop(words.next()),
            ".v2" => lanes = 2,
            ".v4" => lanes = 4,
            "[" => {
                let n: u64 = words.next().and_then(|n| n.text.parse().ok()).ok_or_else(unknown)?;
                count = count.checked_mul(n).ok_or_else(unknown)?;
                if words.next().is_none_or(|t| t.text != "]") {
                    return Err(unknown());
                }
            }
            "=" | ";" => break,
            word if word.starts_with('.') => size = Some(element(&word[1..]).ok_or_else(unknown)?),
            word if name.is_none() && token.is_word() => name = Some(word.to_string()),
            _ => return Err(unknown()),
        }
    }
    let bytes = u64::from(size.ok_or_else(unknown)?).checked_mul(lanes).and_then(|n| n.checked_mul(count));
    Ok(Variable { name: name.ok_or_else(unknown)?, bytes: bytes.ok_or_else(unknown)? })
}

struct Rewriter<'a> {
    tokens: &'a [Token<'a>],
    at: usize,
    out: String,
    /// The line of the recipe's text, 0 if it is not known.
    line: u32,
    facts: &'a Facts,
    layout: Layout,
    guard: Guard,
}

impl<'a> Rewriter<'a> {
    fn peek(&self) -> Option<&'a str> {
        self.tokens.get(self.at).map(|t| t.text)
    }

    fn next(&mut self) -> Read<&'a str> {
        let token = self.tokens.get(self.at).ok_or("it ends in the middle of a statement")?;
        self.at += 1;
        Ok(token.text)
    }

    /// The tokens from here to the first of `ends`, which is passed too.
    fn until(&mut self, ends: &[&str]) -> Read<&'a [Token<'a>]> {
        let rest = &self.tokens[self.at..];
        let end = rest.iter().position(|t| ends.contains(&t.text)).ok_or("a statement has no end")?;
        self.at += end + 1;
        Ok(&rest[..=end])
    }

    /// Prints some tokens as a line.
    fn copy(&mut self, tokens: &[Token]) {
        self.out.push_str(&print(tokens));
        self.out.push('\n');
    }

    fn module(&mut self) -> Read<()> {
        while let Some(word) = self.peek() {
            let start = self.at;
            match word {
                ".version" => self.take(2)?,
                ".address_size" => {
                    self.take(2)?;
                    if self.tokens[start + 1].text != "64" {
                        return Err("its addresses do not have 64 bits".into());
                    }
                    self.out.push_str(&checks::variables(&self.layout));
                }
                ".target" => {
                    self.at += 2;
                    while self.peek() == Some(",") {
                        self.at += 2;
                    }
                    self.at = self.at.min(self.tokens.len());
                    self.copy(&self.tokens[start..self.at]);
                }
                ".file" => {
                    self.at += 3;
                    while self.peek() == Some(",") {
                        self.at += 2;
                    }
                    self.at = self.at.min(self.tokens.len());
                    self.copy(&self.tokens[start..self.at]);
                }
                ".section" => {
                    let section = self.until(&["{"])?;
                    if !section.get(1).is_some_and(|t| t.text.starts_with(".debug")) {
                        return Err("it has a section that is not of line numbers".into());
                    }
                    self.copy(section);
                    let content = self.until(&["}"])?;
                    // A line for each directive.
                    for token in content {
                        self.out.push_str(if token.text.starts_with('.') { "\n" } else { " " });
                        self.out.push_str(token.text);
                    }
                    self.out.push('\n');
                }
                ".visible" | ".weak" | ".extern" | ".common" => {
                    self.at += 1;
                    if word == ".extern" && self.peek() == Some(".global") {
                        return Err("it has a variable of another module".into());
                    }
                    self.out.push_str(word);
                    self.out.push(' ');
                }
                ".func" | ".entry" => self.function()?,
                ".global" | ".const" | ".shared" => {
                    let list = self.until(&[";"])?;
                    self.copy(list);
                }
                ".pragma" => drop(self.until(&[";"])?),
                ".loc" => self.loc()?,
                ";" => self.take(1)?,
                other => return Err(format!("it has {other} outside of a function")),
            }
        }
        Ok(())
    }

    /// Copies the next `n` tokens.
    fn take(&mut self, n: usize) -> Read<()> {
        let list = self.tokens.get(self.at..self.at + n).ok_or("it ends in the middle of a statement")?;
        self.at += n;
        self.copy(list);
        Ok(())
    }

    /// Reads `.loc file line column`, with `, function_name label, inlined_at file line column` for a function that is inlined.
    fn loc(&mut self) -> Read<()> {
        let start = self.at;
        self.at += 4;
        let mut place = [start + 1, start + 2];
        let text = |this: &Self, k: usize| this.tokens.get(k).map_or("", |t| t.text);
        if self.peek() == Some(",") && text(self, self.at + 1) == "function_name" {
            self.at += 3;
            if self.peek() == Some("+") {
                self.at += 2;
            }
            if self.peek() == Some(",") && text(self, self.at + 1) == "inlined_at" {
                if !self.facts.files.contains(text(self, place[0])) {
                    place = [self.at + 2, self.at + 3];
                }
                self.at += 5;
            }
        }
        let list = self.tokens.get(start..self.at).ok_or("a .loc has no end")?;
        if !list.iter().all(|t| t.is_word() || matches!(t.text, "," | "+")) {
            return Err("a .loc is not known".into());
        }
        self.copy(list);
        if self.facts.files.contains(text(self, place[0]))
            && let Ok(line @ 1..) = text(self, place[1]).parse()
        {
            self.line = line;
        }
        Ok(())
    }

    /// Copies a function, with checks.
    fn function(&mut self) -> Read<()> {
        let header = Header::read(&self.tokens[self.at..])?;
        let is_entry = self.peek() == Some(".entry");
        let list = &self.tokens[self.at..=self.at + header.tokens];
        let clustered = [".reqnctapercluster", ".explicitcluster", ".blocksareclusters", ".maxclusterrank"];
        if let Some(word) = list.iter().find(|t| clustered.contains(&t.text)) {
            return Err(format!("it has {}", word.text));
        }
        if !is_entry {
            self.facts.declares(list)?;
        }
        self.at += list.len();
        self.copy(list);
        if !header.is_defined {
            return Ok(());
        }
        let facts = self.facts;
        let place = if is_entry { Place::Entry(&facts.params) } else { Place::Function };
        if is_entry && facts.functions.len() > 1 {
            self.out.push_str(&checks::publish(&facts.params));
        }
        if self.guard.stop {
            self.out.push_str(STOP_STATE);
            if !is_entry {
                // Functions may call themselves.
                self.out.push_str(&checks::stop(&place, &self.layout));
            }
        }
        let mut function = Function { place, labels: HashSet::new(), tables: HashMap::new() };
        let mut depth = 1;
        while depth > 0 {
            match self.peek().ok_or("a function has no end")? {
                "{" => {
                    depth += 1;
                    self.take(1)?;
                }
                "}" => {
                    depth -= 1;
                    self.take(1)?;
                }
                _ => self.statement(&mut function)?,
            }
        }
        Ok(())
    }

    fn statement(&mut self, function: &mut Function<'a>) -> Read<()> {
        let word = self.peek().unwrap_or_default();
        match word {
            ".loc" => return self.loc(),
            ".reg" | ".local" | ".shared" | ".param" | ".const" => {
                let list = self.until(&[";"])?;
                self.facts.declares(list)?;
                self.copy(list);
                return Ok(());
            }
            // Hints for loops; one about the bytes of a load would be about an instruction of the check.
            ".pragma" => {
                let list = self.until(&[";"])?;
                if list.get(1).is_some_and(|t| t.text == "\"nounroll\"") {
                    self.copy(list);
                }
                return Ok(());
            }
            ";" => return self.take(1),
            _ => {}
        }
        if self.tokens.get(self.at + 1).is_some_and(|t| t.text == ":") && self.tokens[self.at].is_word() {
            self.facts.declares(&self.tokens[self.at..=self.at])?;
            self.take(2)?;
            function.labels.insert(word);
            if self.peek() == Some(".branchtargets") {
                let list = self.until(&[";"])?;
                function.tables.insert(word, list.iter().skip(1).filter(|t| t.is_word()).map(|t| t.text).collect());
                self.copy(list);
            }
            return Ok(());
        }
        let predicate = if word == "@" {
            self.at += 1;
            let is_negated = self.peek() == Some("!");
            self.at += usize::from(is_negated);
            Some((self.next()?, is_negated))
        } else {
            None
        };
        let opcode = self.peek().unwrap_or_default();
        if !self.tokens.get(self.at).is_some_and(Token::is_word) || opcode.starts_with(['.', '%', '$']) {
            return Err(format!("it has {opcode} in a function"));
        }
        let list = self.until(&[";"])?;
        self.instruction(function, predicate, list)
    }

    fn instruction(
        &mut self,
        function: &mut Function<'a>,
        predicate: Option<(&'a str, bool)>,
        list: &'a [Token<'a>],
    ) -> Read<()> {
        let opcode = list[0].text;
        let mut class = classify(opcode);
        if !self.guard.check && !matches!(class, Class::Branch | Class::IndexedBranch) {
            class = Class::Harmless;
        }
        let before =
            predicate.map_or(String::new(), |(p, is_negated)| format!("@{}{p} ", if is_negated { "!" } else { "" }));
        let unknown = || format!("{opcode} is not one of the instructions that --check-kernels checks");
        match class {
            Class::Unknown => return Err(unknown()),
            Class::Harmless => {}
            Class::Call => self.callee(list)?,
            Class::Branch => {
                let target = list.get(1).map_or("", |t| t.text);
                if function.labels.contains(target) {
                    self.stop(function);
                }
            }
            Class::IndexedBranch => {
                let [_, index, comma, table, _] = list else { return Err(unknown()) };
                let targets = function.tables.get(table.text).ok_or_else(unknown)?;
                if comma.text != "," || !index.is_word() || targets.is_empty() {
                    return Err(unknown());
                }
                let (last, goes_back) = (targets.len() - 1, targets.iter().any(|t| function.labels.contains(t)));
                if goes_back {
                    self.stop(function);
                }
                // An index outside of the table would jump anywhere.
                self.out.push_str(&format!(
                    "{{ .reg .b32 __plck_r;\nmin.u32 __plck_r, {}, {last};\n{before}{opcode} __plck_r, {};\n}}\n",
                    index.text, table.text
                ));
                return Ok(());
            }
            Class::Access { act, is_generic, bytes } => {
                let address = only_address(list, 0).ok_or_else(unknown)?;
                if list[address.1 + 1..].iter().any(|t| t.text == "[") {
                    return Err(unknown());
                }
                return self.access(function, predicate, list, address, (act, is_generic, bytes));
            }
            Class::CopyAsync => {
                let to = only_address(list, 0).ok_or_else(unknown)?;
                let from = only_address(list, to.1 + 1).ok_or_else(unknown)?;
                let [comma, size, rest @ ..] = &list[from.1 + 1..] else { return Err(unknown()) };
                // With a size of the source, fewer bytes are read than are written.
                if rest.iter().any(|t| t.text == ",") {
                    return Err(format!(
                        "{} reads a number of bytes that is not checked: copy whole words",
                        print(list)
                    ));
                }
                let bytes = size.text.parse().ok().filter(|n| [4, 8, 16].contains(n)).ok_or_else(unknown)?;
                if comma.text != "," || rest.iter().any(|t| t.text == "[") {
                    return Err(unknown());
                }
                return self.access(function, predicate, list, from, (Act::Read, false, bytes));
            }
        }
        self.out.push_str(&before);
        self.copy(list);
        Ok(())
    }

    /// Prints an access with its check. `address`: where its brackets are.
    fn access(
        &mut self,
        function: &Function,
        predicate: Option<(&str, bool)>,
        list: &[Token],
        address: (usize, usize),
        (act, is_generic, bytes): (Act, bool, u32),
    ) -> Read<()> {
        let unknown = || format!("the address {} is not understood", print(&list[address.0..=address.1]));
        let inside = &list[address.0 + 1..address.1];
        let (base, offset) = match inside {
            [base] => (base, String::new()),
            [base, plus, rest @ ..] if plus.text == "+" && !rest.is_empty() => (base, print(rest)),
            [base, minus, number] if minus.text == "-" => (base, format!("-{}", number.text)),
            _ => return Err(unknown()),
        };
        let number = offset.strip_prefix('-').unwrap_or(&offset);
        if !base.is_word() || !number.bytes().all(|b| b.is_ascii_digit()) {
            return Err(unknown());
        }
        let access = Access { act, is_generic, bytes, base: base.text, offset: &offset, predicate, line: self.line };
        self.out.push_str(&checks::check(&access, &function.place, &self.layout, &self.facts.variables));
        if let Some((p, is_negated)) = predicate {
            self.out.push_str(if is_negated { "@!" } else { "@" });
            self.out.push_str(p);
            self.out.push(' ');
        }
        self.out.push_str(&print(&list[..=address.0]));
        self.out.push_str("__plck_t");
        self.copy(&list[address.1..]);
        self.out.push_str("}\n");
        Ok(())
    }

    fn stop(&mut self, function: &Function) {
        if self.guard.stop {
            self.out.push_str(&checks::stop(&function.place, &self.layout));
        }
    }

    /// Refuses a call of what is not a function of the module, by its name.
    fn callee(&self, list: &[Token]) -> Read<()> {
        let mut depth = 0usize;
        let mut names = Vec::new();
        for token in &list[1..list.len() - 1] {
            match token.text {
                "(" => depth += 1,
                ")" => depth = depth.saturating_sub(1),
                _ if depth == 0 && token.is_word() => names.push(token.text),
                _ => {}
            }
        }
        match names[..] {
            [name] if self.facts.functions.contains(name) => Ok(()),
            ["vprintf"] => Err("it calls printf, whose reads are not checked".into()),
            [name] if !name.starts_with('%') => Err(format!("it calls {name}, whose accesses are not checked")),
            _ => Err("it calls a function by its address".into()),
        }
    }
}

/// What is known of the function that is read.
struct Function<'a> {
    place: Place<'a>,
    /// Labels so far: a branch to one of them goes back.
    labels: HashSet<&'a str>,
    tables: HashMap<&'a str, Vec<&'a str>>,
}

/// Where the first brackets from `start` on are.
fn only_address(list: &[Token], start: usize) -> Option<(usize, usize)> {
    let open = start + list.get(start..)?.iter().position(|t| t.text == "[")?;
    let close = open + list[open..].iter().position(|t| t.text == "]")?;
    Some((open, close))
}
