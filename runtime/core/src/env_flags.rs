//! Parses environment flags: one table, one parser. docs/guide/errors.md documents each flag.
//!
//! A command rejects unknown values before it computes anything ([`check`]). Later reads use the value as it is; in a
//! program that is not a command, an unknown value means the default. An empty value counts as unset: `PERILUNE_FUSION=
//! perilune run …` unsets the variable for one command.

use crate::error::{Error, Result};

/// An environment variable that is on, off, or one of a few words.
#[derive(Debug)]
pub struct EnvFlag {
    pub name: &'static str,
    /// Accepted words besides those for on and off; all accepted words if it is not `toggled`.
    pub words: &'static [&'static str],
    /// Whether it accepts on and off.
    pub toggled: bool,
}

/// The value of a flag.
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
/// How GPUs of one process exchange tensors: by reading each other's memory, unless it is `nccl`.
pub static COLLECTIVES: EnvFlag =
    EnvFlag { name: "PERILUNE_COLLECTIVES", words: &["memory", "host", "nccl"], toggled: false };
/// The instruction set of the CPU's loops, in ascending order.
pub static CPU_ISA: EnvFlag = EnvFlag { name: "PERILUNE_CPU_ISA", words: &["sse2", "avx2", "avx512"], toggled: false };

pub static ALL: [&EnvFlag; 9] =
    [&FUSION, &PRINT_PLAN, &CHECK_NAN, &REPORT_MISSES, &REPLAY, &TUNE, &CUDNN, &COLLECTIVES, &CPU_ISA];

const ON: [&str; 4] = ["1", "on", "true", "yes"];
const OFF: [&str; 4] = ["0", "off", "false", "no"];

impl EnvFlag {
    const fn plain(name: &'static str) -> EnvFlag {
        EnvFlag { name, words: &[], toggled: true }
    }

    /// Parses a value; `None` if it is empty.
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

    /// Reads the flag from the environment; `None` if the variable is not set.
    pub fn read(&self) -> Result<Option<Setting>> {
        match std::env::var_os(self.name) {
            Some(value) => self.parse(&value.to_string_lossy()),
            None => Ok(None),
        }
    }

    /// Reads the flag and ignores unknown values: see [`check`].
    pub fn setting(&self) -> Option<Setting> {
        self.read().unwrap_or_default()
    }

    /// Whether the flag is on; `default` if it is not set.
    pub fn is_on(&self, default: bool) -> bool {
        self.setting().map_or(default, |s| s != Setting::Off)
    }
}

/// Checks all flags; the first one with an unknown value is an error.
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
