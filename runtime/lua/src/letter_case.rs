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
        let string: Table = lua.globals().get("string").expect("the library");
        lua.globals()
            .set("own", lua.create_table_from(string.pairs::<String, mlua::Value>().flatten()).expect("a copy"))
            .expect("set");
        install(&lua).expect("installed");
        let text = r#"
            assert(string.lower ~= own.lower and string.upper ~= own.upper)
            local bytes = {}
            for b = 0, 255 do bytes[#bytes + 1] = string.char(b) end
            bytes = table.concat(bytes)
            for _, x in ipairs { "", "a", "Z", "ÄÖ", bytes, ("Perilune "):rep(1000), 17, 2.5 } do
              for _, name in ipairs { "lower", "upper" } do
                assert(string[name](x) == own[name](x), name)
              end
            end
            assert(("MiXed"):lower() == "mixed" and ("MiXed"):upper() == "MIXED")
            for _, x in ipairs { {}, true } do
              local _, mine = pcall(string.lower, x)
              local _, theirs = pcall(own.lower, x)
              assert(tostring(mine) == tostring(theirs), tostring(mine))
            end
        "#;
        lua.load(text).exec().expect("equal");
    }
}
