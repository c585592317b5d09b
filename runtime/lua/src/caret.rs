//! Finds the columns that an error points at: Lua knows the line of an error, and the message names what is wrong in it.

/// Returns the text under the source line that points at the subject of a message: spaces and tabs, then one `^` for each character.
/// `None` if the line does not have the subject exactly once.
pub(crate) fn below(source: &str, message: &str) -> Option<String> {
    let (at, len) = subjects(message).find_map(|subject| once(source, subject))?;
    let before: String = source[..at].chars().map(|c| if c == '\t' { '\t' } else { ' ' }).collect();
    Some(before + &"^".repeat(source[at..at + len].chars().count()))
}

/// Lists what a message may be about, the likeliest first: words in quotes, then the op in front of its first colon.
fn subjects(message: &str) -> impl Iterator<Item = &str> {
    let first = message.lines().next().unwrap_or_default();
    let quoted = first.split('\'').skip(1).step_by(2);
    let op = first.split_once(": ").map(|(op, _)| op.rsplit(['.', ':']).next().unwrap_or(op));
    // With an odd number of quotes the last part is not quoted.
    let pairs = first.matches('\'').count() / 2;
    quoted.take(pairs).chain(op).filter(|s| !s.is_empty() && s.chars().count() <= 60)
}

/// Returns where a text has `word` as a whole word, if it has it once.
fn once(text: &str, word: &str) -> Option<(usize, usize)> {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    let (starts, ends) = (word.starts_with(part), word.ends_with(part));
    let mut found = text.match_indices(word).map(|m| m.0).filter(|at| {
        let (before, after) = (text[..*at].chars().next_back(), text[at + word.len()..].chars().next());
        !(starts && before.is_some_and(part) || ends && after.is_some_and(part))
    });
    let at = found.next()?;
    found.next().is_none().then_some((at, word.len()))
}

#[cfg(test)]
mod tests {
    use super::below;

    #[test]
    fn the_op_or_the_quoted_word_is_marked() {
        let line = "local y = x:matmul(w)";
        assert_eq!(below(line, "matmul: shapes {2, 3} and {4, 5} do not chain").as_deref(), Some("            ^^^^^^"));
        assert_eq!(below("prnt(x)", "global 'prnt' is not defined").as_deref(), Some("^^^^"));
        assert_eq!(
            below("\tlocal é = nn.Linaer(3)", "nn has no field 'Linaer'").as_deref(),
            Some("\t             ^^^^^^")
        );
        assert_eq!(below("pl.nn.Linear(0, 3)", "nn.Linear: the width is 0").as_deref(), Some("      ^^^^^^"));
    }

    #[test]
    fn an_ambiguous_subject_is_not_marked() {
        assert_eq!(below("x:add(y):add(z)", "add: shapes differ"), None);
        assert_eq!(below("f(x)", "the model has no layer"), None);
        assert_eq!(below("f(x)", "it's wrong"), None);
        // The first one is not there, the second one is.
        assert_eq!(below("g(b)", "'a' is not 'b'").as_deref(), Some("  ^"));
    }
}
