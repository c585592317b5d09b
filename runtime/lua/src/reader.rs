//! Binds a [`Source`] with prefetching for Lua: the batches of one loader.

use crate::errors;
use crate::functions::host;
use crate::recipe_files::{fail, input};
use mlua::{Lua, UserData, UserDataMethods};
use perilune_data::source::{Prefetcher, Samples, Source};

/// The userdata of a loader's batches: `batch(rows, first)` makes the columns of a batch, `prefetch(rows, first)` starts to make it.
pub(crate) struct Reader<S> {
    prefetcher: Prefetcher<S>,
    rows: usize,
    /// The function of the recipe, for errors.
    op: &'static str,
    /// What a row is: "image".
    noun: &'static str,
}

impl<S: Source> Reader<S> {
    /// Starts to read `source` on `threads` threads, by default one per processor.
    pub(crate) fn new(
        lua: &Lua,
        source: S,
        threads: Option<usize>,
        op: &'static str,
        noun: &'static str,
    ) -> mlua::Result<Reader<S>> {
        let (host, rows) = (host(lua)?, source.rows());
        let prefetcher = Prefetcher::new(source, threads).map_err(|e| fail(&host, lua, op, e))?;
        Ok(Reader { prefetcher: prefetcher.interrupted_by(host.interrupt.clone()), rows, op, noun })
    }

    fn check(&self, lua: &Lua, rows: &[usize]) -> mlua::Result<()> {
        check_rows(lua, rows, self.rows, self.op, self.noun)
    }
}

/// Raises for a row beyond the `count` of a source.
pub(crate) fn check_rows(lua: &Lua, rows: &[usize], count: usize, op: &str, noun: &str) -> mlua::Result<()> {
    let Some(beyond) = rows.iter().find(|row| **row >= count) else { return Ok(()) };
    let message = format!("{noun} {beyond} of {count}: {noun}s count from 0 to {}", count.saturating_sub(1));
    Err(errors::argument(&host(lua)?, lua, op, message, None))
}

impl<S: Source> UserData for Reader<S> {
    fn add_methods<M: UserDataMethods<Self>>(methods: &mut M) {
        let methods = &mut crate::boundary::Methods(methods);
        methods.add_method_mut("batch", |lua, this, (rows, first): (Vec<usize>, u64)| {
            let host = host(lua)?;
            this.check(lua, &rows)?;
            let batch = this.prefetcher.take(&Samples { first, rows }).map_err(|e| fail(&host, lua, this.op, e))?;
            let columns = batch.columns.into_iter().map(|column| input(&host, lua, column));
            columns.collect::<mlua::Result<mlua::Variadic<_>>>()
        });
        methods.add_method_mut("prefetch", |lua, this, (rows, first): (Vec<usize>, u64)| {
            this.check(lua, &rows)?;
            this.prefetcher.announce(&Samples { first, rows });
            Ok(())
        });
    }
}
