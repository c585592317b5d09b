//! Replaces `string.lower` and `string.upper` by functions that convert 16 bytes at a time.
//!
//! Lua's own look each byte up in a table of the C locale. The program sets no locale, so the results are the same: only the
//! letters A to Z change. Functions that normalize text spend most of their time there.
#![allow(unsafe_code)]

use mlua::{Lua, Table, ffi, lua_CFunction};
use std::ffi::c_int;
use std::mem::MaybeUninit;

/// Puts both into the `string` library of a state.
pub fn install(lua: &Lua) -> mlua::Result<()> {
    let string: Table = lua.globals().get("string")?;
    let functions: [(&str, lua_CFunction); 2] = [("lower", lower), ("upper", upper)];
    for (name, function) in functions {
        // SAFETY: they take and return what Lua's own do, and own nothing when they raise an error.
        string.raw_set(name, unsafe { lua.create_c_function(function) }?)?;
    }
    Ok(())
}

unsafe extern "C-unwind" fn lower(state: *mut ffi::lua_State) -> c_int {
    // SAFETY: that of this function, which Lua calls.
    unsafe { convert(state, <[u8]>::make_ascii_lowercase) }
}

unsafe extern "C-unwind" fn upper(state: *mut ffi::lua_State) -> c_int {
    // SAFETY: that of this function, which Lua calls.
    unsafe { convert(state, <[u8]>::make_ascii_uppercase) }
}

/// Pushes the first argument, converted in place by `change`.
///
/// # Safety
/// The state is that of a call by Lua.
unsafe fn convert(state: *mut ffi::lua_State, change: impl FnOnce(&mut [u8])) -> c_int {
    let mut length = 0;
    let mut buffer = MaybeUninit::<ffi::luaL_Buffer>::uninit();
    // SAFETY: Lua returns the argument's own bytes, which it keeps during the call, and a buffer of at least `length` bytes, which does not
    // overlap them and is initialized by the copy.
    unsafe {
        let text = ffi::luaL_checklstring(state, 1, &mut length);
        let copy = ffi::luaL_buffinitsize(state, buffer.as_mut_ptr(), length);
        std::ptr::copy_nonoverlapping(text, copy, length);
        change(std::slice::from_raw_parts_mut(copy.cast(), length));
        ffi::luaL_pushresultsize(buffer.as_mut_ptr(), length);
    }
    1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_and_errors_are_those_of_lua() {
        let lua = Lua::new();
        let text = r#"
            local results = {}
            local bytes = {}
            for b = 0, 255 do bytes[#bytes + 1] = string.char(b) end
            local cases = { "", "a", "Z", "ÄÖ", ("MiXed "):rep(1000), table.concat(bytes), 17, 2.5, {}, true }
            for _, x in ipairs(cases) do
              for _, name in ipairs { "lower", "upper" } do
                results[#results + 1] = tostring(select(2, pcall(string[name], x)))
              end
            end
            results[#results + 1] = ("MiXed"):lower() .. ("MiXed"):upper()
            return table.concat(results, "\0"), string.lower, string.upper
        "#;
        let results = || lua.load(text).eval::<(mlua::LuaString, mlua::Function, mlua::Function)>().expect("text");
        let own = results();
        install(&lua).expect("installed");
        let new = results();
        assert!(own.1 != new.1 && own.2 != new.2);
        assert_eq!(own.0.to_string_lossy(), new.0.to_string_lossy());
        assert_eq!(own.0.as_bytes(), new.0.as_bytes());
    }
}
