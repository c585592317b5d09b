//! Catches panics of native functions and raises them as Lua errors.
//!
//! A panic that mlua carries through Lua unwinds every Rust frame between the call and the command, past the code that ends
//! step scopes and restores modes. Here each native function catches its own panic: `pcall` gets an error, an open step is
//! aborted as after any error, borrows of the engine end with their frames, and the prompt continues.
//!
//! [`Guarded`] and [`Methods`] register functions that do this; `mlua::Lua::create_function` is disallowed elsewhere
//! (`clippy.toml`).

use super::{memory_limit, recipe_line};
use crate::errors::Cause;
use mlua::{AnyUserData, FromLua, FromLuaMulti, Function, IntoLua, IntoLuaMulti, Lua, UserDataFields, UserDataMethods};
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

thread_local! {
    /// The depth of guarded calls in this thread, whose panics are not printed.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    /// The file and line of the last panic in a guarded call.
    static PLACE: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Installs a panic hook that does not print panics that become errors. Other panics reach the previous hook.
pub fn install_hook() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if perilune_core::foreign_panic::is_caught() {
                tracing::debug!(%info, "foreign code panicked on its input");
                return;
            }
            if DEPTH.with(Cell::get) == 0 {
                return before(info);
            }
            let place = info.location().map(|l| format!("{}:{}", l.file(), l.line())).unwrap_or_default();
            tracing::error!(%place, "a panic becomes a Lua error");
            PLACE.with(|p| p.replace(place));
            if std::env::var_os("RUST_BACKTRACE").is_some_and(|v| v == "full") {
                before(info);
            }
        }));
    });
}

/// Runs `f`. A panic becomes an error at the recipe's line, and exhausted memory the error that states the limit.
pub fn caught<T>(lua: &Lua, f: impl FnOnce() -> mlua::Result<T>) -> mlua::Result<T> {
    let (mut f, mut out) = (Some(f), None);
    let panic = panic_of(lua, &mut || out = f.take().map(|f| f()));
    match (out, panic) {
        (Some(Ok(value)), _) => Ok(value),
        (Some(Err(error)), _) => Err(raised(lua, error)),
        (None, panic) => Err(panic.unwrap_or_else(|| mlua::Error::runtime("the function did not run"))),
    }
}

// Each native function has its own `caught`. What does not depend on it is compiled once.

/// The error of a panic of `f`.
fn panic_of(lua: &Lua, f: &mut dyn FnMut()) -> Option<mlua::Error> {
    let change_depth = |by| DEPTH.with(|d| d.set(d.get().wrapping_add_signed(by)));
    change_depth(1);
    let out = catch_unwind(AssertUnwindSafe(f));
    change_depth(-1);
    out.err().map(|payload| internal(lua, &*payload))
}

fn raised(lua: &Lua, error: mlua::Error) -> mlua::Error {
    match error {
        mlua::Error::MemoryError(_) => memory_limit::out_of_memory(lua),
        other => other,
    }
}

fn internal(lua: &Lua, payload: &(dyn Any + Send)) -> mlua::Error {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("no message");
    let place = PLACE.with(RefCell::take);
    let message = format!("internal error: {text} ({place})");
    let hint = "this is a bug in perilune, please report it with the recipe's line";
    recipe_line::raised(lua, message, Some(hint.into()), Cause::Internal)
}

/// A Lua state whose native functions catch their panics.
pub struct Guarded<'a>(pub &'a Lua);

impl Deref for Guarded<'_> {
    type Target = Lua;

    fn deref(&self) -> &Lua {
        self.0
    }
}

impl Guarded<'_> {
    #[allow(clippy::disallowed_methods)]
    pub fn create_function<F, A, R>(&self, f: F) -> mlua::Result<Function>
    where
        F: Fn(&Lua, A) -> mlua::Result<R> + 'static,
        A: FromLuaMulti,
        R: IntoLuaMulti,
    {
        self.0.create_function(move |lua, args: A| caught(lua, || f(lua, args)))
    }
}

/// Registers methods and fields that catch their panics.
pub struct Methods<'a, M>(pub &'a mut M);

impl<T, M: UserDataMethods<T>> UserDataMethods<T> for Methods<'_, M> {
    fn add_method<F, A, R>(&mut self, name: impl Into<String>, method: F)
    where
        F: Fn(&Lua, &T, A) -> mlua::Result<R> + 'static,
        A: FromLuaMulti,
        R: IntoLuaMulti,
    {
        self.0.add_method(name, move |lua, this, args: A| caught(lua, || method(lua, this, args)));
    }

    fn add_method_mut<F, A, R>(&mut self, name: impl Into<String>, mut method: F)
    where
        F: FnMut(&Lua, &mut T, A) -> mlua::Result<R> + 'static,
        A: FromLuaMulti,
        R: IntoLuaMulti,
    {
        self.0.add_method_mut(name, move |lua, this, args: A| caught(lua, || method(lua, this, args)));
    }

    fn add_function<F, A, R>(&mut self, name: impl Into<String>, function: F)
    where
        F: Fn(&Lua, A) -> mlua::Result<R> + 'static,
        A: FromLuaMulti,
        R: IntoLuaMulti,
    {
        self.0.add_function(name, move |lua, args: A| caught(lua, || function(lua, args)));
    }

    fn add_function_mut<F, A, R>(&mut self, name: impl Into<String>, mut function: F)
    where
        F: FnMut(&Lua, A) -> mlua::Result<R> + 'static,
        A: FromLuaMulti,
        R: IntoLuaMulti,
    {
        self.0.add_function_mut(name, move |lua, args: A| caught(lua, || function(lua, args)));
    }

    fn add_meta_method<F, A, R>(&mut self, name: impl Into<String>, method: F)
    where
        F: Fn(&Lua, &T, A) -> mlua::Result<R> + 'static,
        A: FromLuaMulti,
        R: IntoLuaMulti,
    {
        self.0.add_meta_method(name, move |lua, this, args: A| caught(lua, || method(lua, this, args)));
    }

    fn add_meta_method_mut<F, A, R>(&mut self, name: impl Into<String>, mut method: F)
    where
        F: FnMut(&Lua, &mut T, A) -> mlua::Result<R> + 'static,
        A: FromLuaMulti,
        R: IntoLuaMulti,
    {
        self.0.add_meta_method_mut(name, move |lua, this, args: A| caught(lua, || method(lua, this, args)));
    }

    fn add_meta_function<F, A, R>(&mut self, name: impl Into<String>, function: F)
    where
        F: Fn(&Lua, A) -> mlua::Result<R> + 'static,
        A: FromLuaMulti,
        R: IntoLuaMulti,
    {
        self.0.add_meta_function(name, move |lua, args: A| caught(lua, || function(lua, args)));
    }

    fn add_meta_function_mut<F, A, R>(&mut self, name: impl Into<String>, mut function: F)
    where
        F: FnMut(&Lua, A) -> mlua::Result<R> + 'static,
        A: FromLuaMulti,
        R: IntoLuaMulti,
    {
        self.0.add_meta_function_mut(name, move |lua, args: A| caught(lua, || function(lua, args)));
    }
}

impl<T, M: UserDataFields<T>> UserDataFields<T> for Methods<'_, M> {
    fn add_field<V: IntoLua + 'static>(&mut self, name: impl Into<String>, value: V) {
        self.0.add_field(name, value);
    }

    fn add_field_method_get<F, R>(&mut self, name: impl Into<String>, method: F)
    where
        F: Fn(&Lua, &T) -> mlua::Result<R> + 'static,
        R: IntoLua,
    {
        self.0.add_field_method_get(name, move |lua, this| caught(lua, || method(lua, this)));
    }

    fn add_field_method_set<F, A>(&mut self, name: impl Into<String>, mut method: F)
    where
        F: FnMut(&Lua, &mut T, A) -> mlua::Result<()> + 'static,
        A: FromLua,
    {
        self.0.add_field_method_set(name, move |lua, this, value: A| caught(lua, || method(lua, this, value)));
    }

    fn add_field_function_get<F, R>(&mut self, name: impl Into<String>, function: F)
    where
        F: Fn(&Lua, AnyUserData) -> mlua::Result<R> + 'static,
        R: IntoLua,
    {
        self.0.add_field_function_get(name, move |lua, this| caught(lua, || function(lua, this)));
    }

    fn add_field_function_set<F, A>(&mut self, name: impl Into<String>, mut function: F)
    where
        F: FnMut(&Lua, AnyUserData, A) -> mlua::Result<()> + 'static,
        A: FromLua,
    {
        self.0.add_field_function_set(name, move |lua, this, value: A| caught(lua, || function(lua, this, value)));
    }

    fn add_meta_field<V: IntoLua + 'static>(&mut self, name: impl Into<String>, value: V) {
        self.0.add_meta_field(name, value);
    }

    fn add_meta_field_with<F, R>(&mut self, name: impl Into<String>, f: F)
    where
        F: FnOnce(&Lua) -> mlua::Result<R> + 'static,
        R: IntoLua,
    {
        self.0.add_meta_field_with(name, f);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Runtime, RuntimeOptions};
    use std::rc::Rc;

    /// A panic in a native function, also in one that holds the engine, is an error that `pcall` sees; steps are aborted and
    /// the engine goes on.
    #[test]
    fn a_panic_is_an_error() {
        let backend = std::sync::Arc::new(perilune_cpu::Cpu::new(Some(1)));
        let (params, policy, print) = (Vec::new(), perilune_policy::Policy::closed(), Rc::new(|_: &str| ()));
        let options = RuntimeOptions { backend, params, policy, strict: false, print };
        let runtime = Runtime::new(options).expect("a runtime");
        let lua = Guarded(runtime.lua());
        let plain = lua.create_function(|_, ()| if true { panic!("as meant") } else { Ok(()) }).expect("made");
        let holds = |lua: &Lua, ()| -> mlua::Result<()> {
            crate::functions::host(lua)?.record(lua, |_| panic!("while the engine is held"))
        };
        lua.globals().set("plain", plain).expect("set");
        lua.globals().set("holds", lua.create_function(holds).expect("made")).expect("set");
        let text = r#"
            local pl = require "perilune"
            local w = pl.state(pl.ones { 2 })
            for _, f in ipairs { plain, holds } do
              local ok, e = pcall(f)
              assert(not ok and tostring(e):find("^test.lua:5: internal error: ") and tostring(e):find("report it"), tostring(e))
              ok, e = pcall(pl.step, function() w:assign(w * 2) f() end)
              assert(not ok and tostring(e):find("internal error"))
              assert(not pl.in_step() and w:sum():item() == 2)
            end
            pl.step(function() w:assign(w * 2) end)
            return w:sum():item()
        "#;
        let sum: f64 = lua.load(text).set_name("@test.lua").eval().expect("runs");
        assert_eq!(sum, 4.0);
        let e = lua.load("plain()").set_name("@test.lua").exec().expect_err("raises");
        assert_eq!(crate::RecipeError::new(&e).cause, Cause::Internal);
        // A sum that overflows is a panic in every profile of the crates that compute sizes (`Cargo.toml`).
        let sum = lua.create_function(|_, n: usize| Ok(std::hint::black_box(usize::MAX) + n)).expect("made");
        lua.globals().set("sum", sum).expect("set");
        let e = lua.load("return sum(1)").set_name("@test.lua").exec().expect_err("raises");
        assert!(e.to_string().contains("internal error: attempt to add with overflow"), "{e}");
    }
}
