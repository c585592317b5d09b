//! Defines the one handle type of the Lua API: a node of a recording, or a State.

use crate::args::{self, Operand};
use crate::boundary::memory_limit;
use crate::errors;
use crate::host::Host;
use crate::{functions, grads, indexing, print, table};
use mlua::{IntoLua, Lua, MetaMethod, UserData, UserDataFields, UserDataMethods, Value};
use perilune_core::graph::NodeId;
use perilune_core::ops::{self, elementwise as e};
use perilune_core::{DType, Error, Shape};
use perilune_engine::{Handle, StateId};
use std::rc::Rc;

/// The referent of a tensor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ref {
    Node(Handle),
    State(StateId),
}

/// A Lua tensor. The engine counts its handles; dropping one notifies the engine.
pub struct Tensor {
    host: Rc<Host>,
    pub what: Ref,
}

impl Tensor {
    /// Wraps a reference that has already been counted.
    pub fn new(host: &Rc<Host>, what: Ref) -> Tensor {
        Tensor { host: host.clone(), what }
    }

    pub fn host(&self) -> &Rc<Host> {
        &self.host
    }

    /// Returns the current node of this tensor.
    pub fn node(&self, engine: &mut perilune_engine::Engine) -> Result<NodeId, Error> {
        match self.what {
            Ref::Node(h) => engine.recorder.node(h),
            Ref::State(s) => engine.state_node(s),
        }
    }

    pub fn meta(&self) -> Result<(Shape, DType), Error> {
        let engine = self.host.engine.borrow();
        match self.what {
            Ref::Node(h) => engine.recorder.meta(h),
            Ref::State(s) => engine.state_info(s).map(|i| (i.shape, i.dtype)),
        }
    }

    /// Like `meta`, but raises at the recipe line.
    pub fn look(&self, lua: &Lua) -> mlua::Result<(Shape, DType)> {
        self.meta().map_err(|e| errors::raise(&self.host, errors::Raise::Fault(e.into(), self.host.loc(lua))))
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        self.host.drop_ref(self.what);
    }
}

/// Records a binary operator; either side may be a number.
fn operator(lua: &Lua, op: &'static ops::Op, a: Operand, b: Operand) -> mlua::Result<Tensor> {
    let host = match (&a, &b) {
        (Operand::Tensor(h, _), _) | (_, Operand::Tensor(h, _)) => h.clone(),
        _ => return Err(mlua::Error::runtime("an operator needs at least one tensor")),
    };
    let id = host.record(lua, |engine| {
        let args = ops::Args::new(op, [a.value(engine)?, b.value(engine)?]);
        engine.call(op, &args).map(|out| out[0])
    })?;
    Ok(host.tensor(id))
}

impl UserData for Tensor {
    fn add_fields<F: UserDataFields<Self>>(fields: &mut F) {
        let fields = &mut crate::boundary::Methods(fields);
        fields.add_field_method_get("shape", |lua, this| {
            let (shape, _) = this.look(lua)?;
            crate::shape_table::table(lua, &shape)
        });
        fields.add_field_method_get("dtype", |lua, this| this.look(lua).map(|m| m.1.name()));
        fields.add_field_method_get("device", |_, this| Ok(this.host.engine.borrow().backend().name().to_string()));
        fields.add_field_method_get("grad", grads::get_grad);
        // A method would borrow the State mutably, and `w.grad = w` reads it.
        fields.add_field_function_set("grad", grads::set_grad);
        fields.add_field_method_get("trainable", |_, this| match this.what {
            Ref::State(s) => Ok(this.host.engine.borrow().state_info(s).is_ok_and(|i| i.trainable)),
            Ref::Node(_) => Ok(false),
        });
        fields.add_field_method_set("trainable", |lua, this, on: bool| match this.what {
            Ref::State(s) => this.host.record(lua, |engine| Ok(engine.set_trainable(s, on)?)),
            Ref::Node(_) => Err(errors::argument(
                &this.host,
                lua,
                "trainable",
                "only a State can be trainable",
                Some("make one with pl.state(t)".into()),
            )),
        });
    }

    fn add_methods<M: UserDataMethods<Self>>(methods: &mut M) {
        let methods = &mut crate::boundary::Methods(methods);
        for (name, op) in [
            (MetaMethod::Add, &e::ADD),
            (MetaMethod::Sub, &e::SUB),
            (MetaMethod::Mul, &e::MUL),
            (MetaMethod::Div, &e::DIV),
            (MetaMethod::IDiv, &e::FLOOR_DIV),
            (MetaMethod::Mod, &e::REMAINDER),
            (MetaMethod::Pow, &e::POW),
        ] {
            methods.add_meta_function(name, move |lua, (a, b): (Operand, Operand)| operator(lua, op, a, b));
        }
        methods.add_meta_method(MetaMethod::Unm, |lua, this, ()| {
            let id = this.host.record(lua, |engine| {
                let x = this.node(engine)?;
                Ok(engine.recorder.graph.neg(x)?)
            })?;
            Ok(this.host.tensor(id))
        });
        methods.add_meta_method(MetaMethod::ToString, |lua, this, ()| print::tensor(lua, this));
        methods.add_meta_method(MetaMethod::Len, |lua, this, ()| {
            let (shape, _) = this.look(lua)?;
            shape.dims().first().copied().ok_or_else(|| {
                errors::argument(
                    &this.host,
                    lua,
                    "#",
                    "a scalar has no length",
                    Some("x:numel() counts elements".into()),
                )
            })
        });
        methods.add_meta_function(MetaMethod::Eq, |_, (a, b): (Value, Value)| {
            // Lua's own equality tests identity. Elementwise comparison is x:eq(y).
            let what = |v: &Value| v.as_userdata().and_then(|u| u.borrow::<Tensor>().ok().map(|t| t.what));
            Ok(what(&a).is_some() && what(&a) == what(&b))
        });
        for (name, method) in [(MetaMethod::Lt, "lt"), (MetaMethod::Le, "le")] {
            methods.add_meta_function(name, move |lua, (a, b): (Operand, Operand)| -> mlua::Result<bool> {
                let host = match (&a, &b) {
                    (Operand::Tensor(h, _), _) | (_, Operand::Tensor(h, _)) => h.clone(),
                    _ => return Err(mlua::Error::runtime("comparison of no tensor")),
                };
                let hint =
                    format!("x:{method}(y) compares element by element, and x:item() gives the number of a scalar");
                Err(errors::argument(
                    &host,
                    lua,
                    "",
                    "< > <= >= give one boolean in Lua, not a tensor of them",
                    Some(hint),
                ))
            });
        }
        methods.add_meta_method(MetaMethod::Index, indexing::index);
        methods.add_meta_function(MetaMethod::Concat, |lua, (a, b): (Value, Value)| -> mlua::Result<()> {
            let hint = "x:item() is the number in a scalar, tostring(x) the text of any tensor";
            let other = if a.is_userdata() { b } else { a };
            let message = format!("a tensor and {} are not joined by ..", args::show(&other));
            Err(errors::argument(&functions::host(lua)?, lua, "", message, Some(hint.into())))
        });
        methods.add_meta_method(MetaMethod::Call, |lua, this, _: mlua::MultiValue| -> mlua::Result<()> {
            let hint = "x[i] reads an element, and modules are what is called: model(x)";
            Err(errors::argument(&this.host, lua, "", "a tensor is not a function", Some(hint.into())))
        });
        methods.add_meta_method(MetaMethod::NewIndex, |lua, this, (key, _): (Value, Value)| -> mlua::Result<()> {
            let (what, hint) = match key.as_string().map(|s| s.to_string_lossy()) {
                Some(name) => (
                    format!("tensors have no field '{name}' that can be written"),
                    "x:reshape, x:to and others return a changed tensor; the fields of a State are grad and trainable",
                ),
                None => (
                    "x[i] = v: tensors are not written in place".to_string(),
                    "writing to a State is spelled w:assign(v); pl.where, pl.cat or x:scatter build changed tensors",
                ),
            };
            Err(errors::argument(&this.host, lua, "", what, Some(hint.into())))
        });
        methods.add_method("size", |lua, this, dim: Option<i64>| {
            let (shape, _) = this.look(lua)?;
            let mut out = mlua::MultiValue::new();
            match dim {
                None => out.extend(shape.dims().iter().map(|d| Value::Integer(*d as i64))),
                Some(d) => {
                    let at = this.host.record(lua, |_| Ok(shape.axis("size", d)?))?;
                    out.push_back(Value::Integer(shape.dims()[at] as i64));
                }
            }
            Ok(out)
        });
        methods.add_method("numel", |lua, this, ()| this.look(lua).map(|m| m.0.numel()));
        methods.add_method("dim", |lua, this, ()| this.look(lua).map(|m| m.0.rank()));
        methods.add_method("item", |lua, this, ()| {
            let t = table::read(lua, this)?;
            if t.numel() != 1 {
                let hint = Some("x:tolist() gives all elements, x:sum() or x[{i, j}] one".into());
                return Err(errors::argument(
                    &this.host,
                    lua,
                    "item",
                    format!("needs one element, shape {} has {}", t.shape, t.numel()),
                    hint,
                ));
            }
            table::number(lua, &t, 0)
        });
        methods.add_method("tolist", |lua, this, ()| {
            let t = table::read(lua, this)?;
            table::nested(lua, &t)
        });
        methods.add_method("is_evaluated", |_, this, ()| match this.what {
            Ref::Node(h) => Ok(this.host.engine.borrow().recorder.is_evaluated(h)),
            Ref::State(_) => Ok(true),
        });
        methods.add_method_mut("free", |_, this, ()| {
            if let Ref::Node(_) = this.what {
                let gone = std::mem::replace(&mut this.what, Ref::Node(Handle::FREED));
                this.host.drop_ref(gone);
                this.host.settle();
            }
            Ok(())
        });
        methods.add_method("is_state", |_, this, ()| Ok(matches!(this.what, Ref::State(_))));
        methods.add_method("assign", |lua, this, value: Operand| {
            let Ref::State(s) = this.what else {
                let hint = Some("make a State with pl.state(t)".into());
                return Err(errors::argument(&this.host, lua, "assign", "only a State can be assigned to", hint));
            };
            this.host.record(lua, |engine| {
                let dtype = engine.state_info(s)?.dtype;
                let id = value.node(engine, dtype)?;
                Ok(engine.assign(s, id)?)
            })
        });
        methods.add_method("backward", grads::backward);
        // `pl.full` is another function, so the op has another name.
        methods.add_function("full", |lua, args: mlua::MultiValue| {
            let op = &ops::distribute::REPLICATE;
            functions::call(lua, op, args::signature(op), args, true)
        });
        for op in ops::all() {
            if op.sig.is_empty() {
                continue;
            }
            let sig = args::signature(op);
            if sig.is_method {
                methods.add_function(op.name, move |lua, args: mlua::MultiValue| {
                    functions::call(lua, op, sig, args, true)
                });
            }
        }
    }
}

/// More than a handle takes in Lua's memory, with its share of the tables that refer to it.
pub const HANDLE_BYTES: usize = 512;

/// Converts one or several tensors to Lua values.
pub fn many(host: &Rc<Host>, lua: &Lua, ids: &[NodeId]) -> mlua::Result<mlua::MultiValue> {
    memory_limit::with_room(lua, ids.len() * HANDLE_BYTES, || {
        let mut out = mlua::MultiValue::new();
        for &id in ids {
            out.push_back(host.tensor(id).into_lua(lua)?);
        }
        Ok(out)
    })
}
