//! Switches in the environment: one table, one parser. docs/guide.md says what each does.
//!
//! A command refuses words that a switch does not take before it computes anything ([`check`]); a reader behind it then
//! takes what it finds, and the default where a program that is no command left a wrong word standing. An empty value is as
//! none: `PERILUNE_FUSION= perilune run …` is how a shell takes a variable away for one line.

use crate::error::{Error, Result};

/// A variable of the environment that is on, off, or one of a few words.
#[derive(Debug)]
pub struct EnvFlag {
    pub name: &'static str,
    /// Words besides those for on and off, or all there are where it is not `toggled`.
    pub words: &'static [&'static str],
    /// Whether it takes on and off.
    pub toggled: bool,
}

/// What a switch is set to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Setting {
    Off,
    On,
    Word(&'static str),
}

pub static FUSION: EnvFlag = EnvFlag::plain("PERILUNE_FUSION");
pub static PRINT_PLAN: EnvFlag = EnvFlag { name: "PERILUNE_PRINT_PLAN", words: &["source"], toggled: true };
pub static CHECK_NAN: EnvFlag = EnvFlag::plain("PERILUNE_CHECK_NAN");
pub static REPORT_MISSES: EnvFlag = EnvFlag::plain("PERILUNE_REPORT_MISSES");
pub static REPLAY: EnvFlag = EnvFlag::plain("PERILUNE_REPLAY");
pub static TUNE: EnvFlag = EnvFlag::plain("PERILUNE_TUNE");
pub static CUDNN: EnvFlag = EnvFlag::plain("PERILUNE_CUDNN");
/// The instruction set of the CPU's loops, from the least to the most.
pub static CPU_ISA: EnvFlag = EnvFlag { name: "PERILUNE_CPU_ISA", words: &["sse2", "avx2", "avx512"], toggled: false };

pub static ALL: [&EnvFlag; 8] = [&FUSION, &PRINT_PLAN, &CHECK_NAN, &REPORT_MISSES, &REPLAY, &TUNE, &CUDNN, &CPU_ISA];

const ON: [&str; 4] = ["1", "on", "true", "yes"];
const OFF: [&str; 4] = ["0", "off", "false", "no"];

impl EnvFlag {
    const fn plain(name: &'static str) -> EnvFlag {
        EnvFlag { name, words: &[], toggled: true }
    }

    /// What a value says; nothing if it is empty.
    fn parse(&self, value: &str) -> Result<Option<Setting>> {
        let word = value.trim().to_ascii_lowercase();
        if word.is_empty() {
            return Ok(None);
        }
        if self.toggled && ON.contains(&word.as_str()) {
            return Ok(Some(Setting::On));
        }
        if self.toggled && OFF.contains(&word.as_str()) {
            return Ok(Some(Setting::Off));
        }
        if let Some(known) = self.words.iter().find(|known| **known == word) {
            return Ok(Some(Setting::Word(known)));
        }
        let more: String = self.words.iter().map(|w| format!(", or {w}")).collect();
        let takes = match self.toggled {
            true => format!("it takes {} for on, {} for off{more}", ON.join(" "), OFF.join(" ")),
            false => format!("it takes {}", self.words.join(" or ")),
        };
        Err(Error::argument("", format!("{}={value}: {takes}", self.name)))
    }

    /// What the environment says; nothing if the variable is not there.
    pub fn read(&self) -> Result<Option<Setting>> {
        match std::env::var_os(self.name) {
            Some(value) => self.parse(&value.to_string_lossy()),
            None => Ok(None),
        }
    }

    /// What the environment says, without a complaint: see [`check`].
    pub fn setting(&self) -> Option<Setting> {
        self.read().unwrap_or_default()
    }

    /// Whether it is on, where the environment says nothing as by default.
    pub fn is_on(&self, default: bool) -> bool {
        self.setting().map_or(default, |s| s != Setting::Off)
    }
}

/// The first variable whose value its switch does not take is an error.
pub fn check() -> Result<()> {
    ALL.iter().try_for_each(|s| s.read().map(drop))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_switches_take_the_same_words() {
        for s in ALL.into_iter().filter(|s| s.toggled) {
            for (value, want) in
                [("off", Setting::Off), ("False", Setting::Off), ("0", Setting::Off), ("1", Setting::On)]
            {
                assert_eq!(s.parse(value), Ok(Some(want)), "{}={value}", s.name);
            }
            assert_eq!(s.parse(""), Ok(None), "{}", s.name);
        }
        assert_eq!(CPU_ISA.parse("AVX2"), Ok(Some(Setting::Word("avx2"))));
        assert_eq!(PRINT_PLAN.parse("source"), Ok(Some(Setting::Word("source"))));
    }

    #[test]
    fn an_unknown_word_names_the_variable_the_value_and_the_words() {
        let e = PRINT_PLAN.parse("sauce").map(drop).map_err(|e| e.to_string());
        let want = "PERILUNE_PRINT_PLAN=sauce: it takes 1 on true yes for on, 0 off false no for off, or source";
        assert_eq!(e, Err(want.to_string()));
        let e = CPU_ISA.parse("1").map(drop).map_err(|e| e.to_string());
        assert_eq!(e, Err("PERILUNE_CPU_ISA=1: it takes sse2 or avx2 or avx512".to_string()));
    }
}
