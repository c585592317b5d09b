//! Refuses CUDA source that opens files: the compiler reads any file that an `#include` names, and its errors print lines of it.
//!
//! Headers of CUDA, `#include <name>` with a relative name and no `..`, stay allowed: they are looked for in the compiler's own
//! folders only.

/// Directives that open a file, and operators that tell whether there is one.
const DIRECTIVES: [&str; 4] = ["include", "include_next", "import", "embed"];
const OPERATORS: [&str; 3] = ["__has_include", "__has_include_next", "__has_embed"];

/// Returns what the source has that opens a file, as it is written.
pub fn opens_file(source: &str) -> Option<String> {
    // Lines that end in a backslash go on (translation phase 2), with blanks behind it too, as compilers read them.
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find('\\') {
        let (before, after) = (&rest[..at], &rest[at + 1..]);
        let line = after.trim_start_matches([' ', '\t', '\r', '\u{b}', '\u{c}']);
        text.push_str(before);
        match line.strip_prefix('\n') {
            Some(next) => rest = next,
            None => {
                text.push('\\');
                rest = after;
            }
        }
    }
    text.push_str(rest);
    let is_word = |c: char| c.is_alphanumeric() || c == '_' || c == '$';
    let mut at = 0;
    while let Some(start) = text[at..].find(is_word).map(|n| at + n) {
        let end = text[start..].find(|c| !is_word(c)).map_or(text.len(), |n| start + n);
        let word = &text[start..end];
        at = end;
        if OPERATORS.contains(&word) {
            return Some(word.into());
        }
        if DIRECTIVES.contains(&word) && is_directive(&text[..start]) {
            let line = text[end..].lines().next().unwrap_or_default().trim();
            let name = line.strip_prefix('<').and_then(|rest| rest.split_once('>'));
            let is_header = name.is_some_and(|(name, behind)| {
                let plain = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
                let parts = name.split('/').all(|part| !["", ".", ".."].contains(&part));
                parts && name.chars().all(plain) && behind.trim().is_empty()
            });
            if word != "include" || !is_header {
                return Some(format!("#{word} {line}").chars().take(80).collect());
            }
        }
    }
    None
}

/// Whether the text ends in the sign of a directive, `#` in any of its spellings, with blanks and comments behind it.
fn is_directive(before: &str) -> bool {
    let mut left = before.trim_end();
    while let Some(comment) = left.strip_suffix("*/") {
        let Some(start) = comment.rfind("/*") else { return true };
        left = comment[..start].trim_end();
    }
    left.ends_with('#') || left.ends_with("%:") || left.ends_with("??=")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_not_opened() {
        for source in [
            "#include \"/etc/passwd\"",
            "  #  include  \"a.txt\"\n",
            "%:include \"a\"",
            "??=include \"a\"",
            "#/* b */include/**/\"a\"",
            "#/*\n*/ /* c */\ninclude \"a\"",
            "#inc\\\nlude \"a\"",
            "#inc\\  \r\nlude \"a\"",
            "#include </etc/passwd>",
            "#include <../../etc/passwd>",
            "#include <a/./b>",
            "#include <cuda_fp16.h> \"x\"",
            "#define F \"/etc/passwd\"\n#include F",
            "#include_next <cuda_fp16.h>",
            "#import \"a\"",
            "#embed \"/etc/passwd\"",
            "#if __has_include(\"/etc/passwd\")\n#endif",
            "#if __has_embed(\"/etc/passwd\")\n#endif",
            "*/ #include \"a\"",
        ] {
            assert!(opens_file(source).is_some(), "{source}");
        }
    }

    #[test]
    fn headers_and_words_are_fine() {
        for source in [
            "",
            "#include <cuda_fp16.h>\n__global__ void k() {}",
            "#include <cuda/std/limits> \r\n",
            "// include the edges\nint included; /* import */ int x = 1 \\ 2;",
            "int include = 3; float y = a % include;",
            "#pragma unroll\n#define N 4\n",
        ] {
            assert_eq!(opens_file(source), None, "{source}");
        }
    }
}
