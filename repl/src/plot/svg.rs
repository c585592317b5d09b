//! Renders a scene as SVG: one file without fonts, scripts or references, which follows the light or dark preference of the
//! viewer.

use super::scene::{Anchor, Ink, PALETTE, Scene, Shape};
use std::fmt::Write;

fn escape(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            // XML cannot represent these characters.
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

/// Formats a coordinate with at most two decimals.
fn n(v: f64) -> String {
    let text = format!("{v:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

fn hex((r, g, b): (u8, u8, u8)) -> String {
    format!("#{r:02x}{g:02x}{b:02x}")
}

/// Colours that do not depend on the preference; the others are classes.
fn color(ink: Ink) -> Option<String> {
    match ink {
        Ink::Series(i) | Ink::Faint(i) => Some(hex(PALETTE[i % PALETTE.len()])),
        Ink::Exact(r, g, b) => Some(hex((r, g, b))),
        _ => None,
    }
}

fn stroke(ink: Ink) -> String {
    let class = match ink {
        Ink::Grid => "grid",
        Ink::Mark => "mark",
        _ => "frame",
    };
    match (color(ink), ink) {
        (Some(c), Ink::Faint(_)) => format!("stroke=\"{c}\" opacity=\"0.35\""),
        (Some(c), _) => format!("stroke=\"{c}\""),
        (None, _) => format!("class=\"{class}\""),
    }
}

/// Renders the file.
pub fn write(scene: &Scene) -> String {
    let (w, h) = (n(scene.width), n(scene.height));
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{w}\" height=\"{h}\" viewBox=\"0 0 {w} {h}\" \
         font-family=\"system-ui, sans-serif\" font-size=\"12\">\n\
         <style>\n\
         .page {{ fill: #ffffff }} text {{ fill: #333333 }} .grid {{ stroke: #e4e4e4 }} .frame {{ stroke: #888888 }} .mark {{ stroke: #777777 }}\n\
         @media (prefers-color-scheme: dark) {{\n  \
         .page {{ fill: #16181d }} text {{ fill: #d8d8d8 }} .grid {{ stroke: #30343c }} .frame {{ stroke: #888888 }} .mark {{ stroke: #9a9a9a }}\n}}\n\
         </style>\n\
         <rect class=\"page\" width=\"{w}\" height=\"{h}\"/>\n"
    );
    for shape in &scene.shapes {
        // Writing to a String cannot fail.
        let _ = match shape {
            Shape::Line { points, ink, width, dashed, tip } => {
                let points: Vec<String> = points.iter().map(|p| format!("{},{}", n(p.0), n(p.1))).collect();
                let dash = if *dashed { " stroke-dasharray=\"3 3\"" } else { "" };
                let tag = format!(
                    "<polyline points=\"{}\" {} stroke-width=\"{}\"{dash} fill=\"none\" stroke-linejoin=\"round\"",
                    points.join(" "),
                    stroke(*ink),
                    n(*width)
                );
                match tip {
                    Some(tip) => writeln!(out, "{tag}><title>{}</title></polyline>", escape(tip)),
                    None => writeln!(out, "{tag}/>"),
                }
            }
            Shape::Dot { at, r, ink } => {
                let fill = color(*ink).unwrap_or_else(|| "#888888".into());
                writeln!(out, "<circle cx=\"{}\" cy=\"{}\" r=\"{}\" fill=\"{fill}\"/>", n(at.0), n(at.1), n(*r))
            }
            Shape::Box { x, y, w, h, ink } => {
                let fill = color(*ink).unwrap_or_else(|| "#888888".into());
                let (x, y, w, h) = (n(*x), n(*y), n(*w), n(*h));
                // Antialiased edges would show the page between neighbouring cells of a heat map.
                let crisp = if matches!(ink, Ink::Exact(..)) { " shape-rendering=\"crispEdges\"" } else { "" };
                writeln!(out, "<rect x=\"{x}\" y=\"{y}\" width=\"{w}\" height=\"{h}\" fill=\"{fill}\"{crisp}/>")
            }
            Shape::Text { at, text, anchor, title } => {
                let anchor = match anchor {
                    Anchor::Begin => "",
                    Anchor::Middle => " text-anchor=\"middle\"",
                    Anchor::End => " text-anchor=\"end\"",
                };
                let weight = if *title { " font-weight=\"600\" font-size=\"14\"" } else { "" };
                writeln!(out, "<text x=\"{}\" y=\"{}\"{anchor}{weight}>{}</text>", n(at.0), n(at.1), escape(text))
            }
        };
    }
    out.push_str("</svg>\n");
    out
}
