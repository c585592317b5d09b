//! Checks conversations: roles, empty turns, and whether there is an answer to train.

use crate::field::Rows;
use perilune_data::records::Value;

/// Records with faulty conversations.
#[derive(Clone, Default, Debug)]
pub struct ChatFaults {
    pub order: Rows,
    pub empty: Rows,
    pub unanswered: Rows,
}

/// The role and the content of a turn, `None` if the value is no turn.
pub fn turn(value: &Value) -> Option<(&str, &Value)> {
    let Value::Map(map) = value else { return None };
    let Value::Text(role) = map.get("role").or_else(|| map.get("from"))? else { return None };
    let content = map.get("content").or_else(|| map.get("value"));
    // A call of a tool needs no content.
    let calls = map.get("tool_calls");
    Some((role, content.filter(|c| !matches!(c, Value::Null)).or(calls).or(content).unwrap_or(&Value::Null)))
}

fn is_empty(content: &Value) -> bool {
    match content {
        Value::Null => true,
        Value::Text(t) => t.trim().is_empty(),
        Value::List(l) => l.is_empty(),
        _ => false,
    }
}

impl ChatFaults {
    /// Users and assistants take turns; system turns come first; results of tools follow an assistant.
    pub fn add(&mut self, value: &Value, row: u64) {
        let Value::List(list) = value else { return };
        let turns: Vec<(&str, &Value)> = list.iter().filter_map(turn).collect();
        let (mut before, mut ordered, mut answered) = ("", turns.len() == list.len(), false);
        for (role, content) in &turns {
            let role = match *role {
                "human" => "user",
                "gpt" | "model" | "bot" => "assistant",
                "function" | "observation" | "ipython" => "tool",
                "developer" => "system",
                role => role,
            };
            ordered &= match role {
                "system" => matches!(before, "" | "system"),
                "user" => matches!(before, "" | "system" | "assistant"),
                "assistant" => matches!(before, "user" | "tool"),
                "tool" => matches!(before, "assistant" | "tool"),
                // Roles of other templates are not judged.
                _ => true,
            };
            answered |= role == "assistant" && !is_empty(content);
            before = role;
        }
        if turns.iter().any(|t| is_empty(t.1)) {
            self.empty.add(row);
        }
        if !ordered {
            self.order.add(row);
        }
        if !answered {
            self.unanswered.add(row);
        }
    }

    pub fn merge(&mut self, other: ChatFaults) {
        self.order.merge(other.order);
        self.empty.merge(other.empty);
        self.unanswered.merge(other.unanswered);
    }
}
