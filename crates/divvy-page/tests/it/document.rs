//! HTML as a browser reads it.

use std::collections::BTreeSet;

use scraper::{ElementRef, Html, Node, Selector};

pub(crate) fn select<'d>(document: &'d Html, selector: &str) -> Vec<ElementRef<'d>> {
    let selector = Selector::parse(selector).expect("a selector");
    document.select(&selector).collect()
}

/// Return the text in elements, with single spaces.
pub(crate) fn text(document: &Html, selector: &str) -> Vec<String> {
    let of = |element: ElementRef<'_>| {
        element
            .text()
            .collect::<String>()
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ")
    };
    select(document, selector).into_iter().map(of).collect()
}

pub(crate) fn ids(document: &Html) -> BTreeSet<String> {
    let all = select(document, "[id]").into_iter().filter_map(|element| element.attr("id"));
    all.map(str::to_owned).collect()
}

/// Return the tree as text: an element in each line.
pub(crate) fn outline(html: &str) -> String {
    let document = Html::parse_fragment(html);
    let mut lines = String::new();
    print(document.tree.root(), 0, &mut lines);
    lines
}

fn print(node: ego_tree::NodeRef<'_, Node>, depth: usize, lines: &mut String) {
    for child in node.children() {
        let indent = "  ".repeat(depth);
        match child.value() {
            Node::Element(element) if element.name() == "html" => print(child, depth, lines),
            Node::Element(element) => {
                let attributes: String = element.attrs().map(|(name, value)| format!(" {name}={value:?}")).collect();
                lines.push_str(&format!("{indent}{}{attributes}\n", element.name()));
                print(child, depth + 1, lines);
            }
            Node::Text(text) => lines.push_str(&format!("{indent}| {}\n", &**text)),
            _ => {}
        }
    }
}
