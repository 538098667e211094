//! The part of Go's text/template that the chart uses, and nothing else.
//!
//! ```text
//! {{ .Values.a.b }}  {{ . }}  {{ "text" }}          a path from where we are, a text
//! {{ VALUE | quote }}  {{ VALUE | default OTHER }}  {{ eq TEXT OTHER }}  {{ toYaml VALUE | nindent 4 }}  {{ include "name" . }}
//! {{ if VALUE }} {{ else }} {{ end }}   {{ with VALUE }} {{ else }} {{ end }}   {{ range VALUE }} {{ end }}
//! {{ fail "text" }}                                   what was chosen does not go together
//! {{ define "name" }} {{ end }}   {{/* comment */}}   {{- and -}} take white space away
//! ```
//!
//! No variables, no functions beside those, no assignments: everything else is an error with file and line, when the chart is read and
//! not only when a value leads there.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde_json::Value;

use super::{Error, yaml};

/// How deep `include` may go.
const DEEPEST: usize = 16;

/// The templates of a chart, parsed.
#[derive(Debug)]
pub struct Templates<'a> {
    files: BTreeMap<&'a str, Vec<Node<'a>>>,
    defines: BTreeMap<String, (&'a str, Vec<Node<'a>>)>,
}

#[derive(Debug)]
enum Node<'a> {
    Text(Cow<'a, str>),
    Print(Pipe),
    If(Pipe, Vec<Node<'a>>, Vec<Node<'a>>),
    With(Pipe, Vec<Node<'a>>, Vec<Node<'a>>),
    Range(Pipe, Vec<Node<'a>>),
}

#[derive(Debug)]
struct Pipe {
    line: usize,
    calls: Vec<Call>,
}

#[derive(Debug)]
enum Call {
    Value(Operand),
    Include(String, Operand),
    ToYaml(Option<Operand>),
    Nindent(usize, Option<Operand>),
    Quote(Option<Operand>),
    Default(Operand, Option<Operand>),
    Eq(Operand, Operand),
    Fail(String),
}

#[derive(Debug, PartialEq, Eq)]
enum Operand {
    /// Empty: `.` itself.
    Path(Vec<String>),
    Text(String),
}

const UNDERSTOOD: &str = "understood are paths such as .Values.a.b, texts in double quotes, if, else, with, range, define, end, include, toYaml, \
                          nindent, quote, default and eq";

impl<'a> Templates<'a> {
    /// Reads all files.
    ///
    /// # Errors
    /// The first thing that is not understood, with file and line.
    pub fn parse(files: &[(&'a str, &'a str)]) -> Result<Templates<'a>, Error> {
        let mut templates = Templates {
            files: BTreeMap::new(),
            defines: BTreeMap::new(),
        };
        for (file, text) in files {
            let tokens = tokens(text).map_err(|(line, text)| error(file, line, text))?;
            let mut parser = Parser {
                tokens: tokens.into_iter().peekable(),
                defines: Vec::new(),
            };
            let (nodes, end) = parser.block(None).map_err(|(line, text)| error(file, line, text))?;
            if let Some((line, word)) = end {
                return Err(error(file, line, format!("{{{{ {word} }}}} ends nothing")));
            }
            templates.files.insert(file, nodes);
            for (line, name, body) in parser.defines {
                if templates.defines.insert(name.clone(), (file, body)).is_some() {
                    return Err(error(file, line, format!("{name:?} is defined twice")));
                }
            }
        }
        Ok(templates)
    }

    /// The text of one file.
    ///
    /// # Errors
    /// A value is not of the kind that its place needs.
    pub fn render(&self, file: &str, context: &Value) -> Result<String, Error> {
        let nodes = self
            .files
            .get(file)
            .ok_or_else(|| Error::Chart(format!("there is no file {file}")))?;
        let mut out = String::new();
        self.nodes(file, nodes, context, DEEPEST, &mut out)?;
        Ok(out)
    }

    fn nodes(&self, file: &str, nodes: &[Node<'_>], dot: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        for node in nodes {
            match node {
                Node::Text(text) => out.push_str(text),
                Node::Print(pipe) => {
                    let value = self.pipe(file, pipe, dot, depth)?;
                    out.push_str(&printed(&value).map_err(|text| error(file, pipe.line, text))?);
                }
                Node::If(pipe, yes, no) => {
                    let branch = if is_true(&*self.pipe(file, pipe, dot, depth)?) {
                        yes
                    } else {
                        no
                    };
                    self.nodes(file, branch, dot, depth, out)?;
                }
                Node::With(pipe, yes, no) => {
                    let value = self.pipe(file, pipe, dot, depth)?;
                    if is_true(&value) {
                        self.nodes(file, yes, &value, depth, out)?;
                    } else {
                        self.nodes(file, no, dot, depth, out)?;
                    }
                }
                Node::Range(pipe, body) => match &*self.pipe(file, pipe, dot, depth)? {
                    Value::Null => {}
                    Value::Array(list) => {
                        for item in list {
                            self.nodes(file, body, item, depth, out)?;
                        }
                    }
                    other => {
                        return Err(error(
                            file,
                            pipe.line,
                            format!("range needs a list, and this is {}", kind(other)),
                        ));
                    }
                },
            }
        }
        Ok(())
    }

    fn pipe<'v>(&self, file: &str, pipe: &Pipe, dot: &'v Value, depth: usize) -> Result<Cow<'v, Value>, Error> {
        let mut last: Option<Cow<'v, Value>> = None;
        let fail = |text: String| error(file, pipe.line, text);
        let look = |operand: &Operand| look(operand, dot).map_err(fail);
        for call in &pipe.calls {
            // The last argument is what came through the pipe.
            let argument = |given: &Option<Operand>, piped: Option<Cow<'v, Value>>| match (given, piped) {
                (Some(operand), None) => look(operand),
                (None, Some(value)) => Ok(value),
                _ => Err(fail("a function has too few or too many arguments".to_owned())),
            };
            let piped = last.take();
            let text = |text: String| Cow::Owned(Value::String(text));
            last = Some(match call {
                Call::Value(operand) => look(operand)?,
                Call::Include(name, operand) => {
                    let (defined_in, body) = self
                        .defines
                        .get(name)
                        .ok_or_else(|| fail(format!("nothing is defined as {name:?}")))?;
                    let depth = depth
                        .checked_sub(1)
                        .ok_or_else(|| fail(format!("{name:?} includes itself")))?;
                    let mut out = String::new();
                    self.nodes(defined_in, body, &*look(operand)?, depth, &mut out)?;
                    text(out)
                }
                Call::ToYaml(given) => text(yaml::to_yaml(&*argument(given, piped)?)),
                Call::Nindent(spaces, given) => {
                    let value = printed(&*argument(given, piped)?).map_err(fail)?;
                    let pad = " ".repeat(*spaces);
                    text(format!("\n{pad}{}", value.replace('\n', &format!("\n{pad}"))))
                }
                Call::Quote(given) => match &*argument(given, piped)? {
                    Value::Null => text(String::new()),
                    value => text(quoted(&printed(value).map_err(fail)?).map_err(fail)?),
                },
                // What the user chose does not go together, and the chart says why.
                Call::Fail(why) => {
                    return Err(Error::Values {
                        origin: "these values".to_owned(),
                        text: why.clone(),
                    });
                }
                Call::Default(otherwise, given) => {
                    let value = argument(given, piped)?;
                    if is_true(&value) { value } else { look(otherwise)? }
                }
                // Go compares numbers by their types, too; texts are all that is needed.
                Call::Eq(one, other) => match (&*look(one)?, &*look(other)?) {
                    (Value::String(one), Value::String(other)) => Cow::Owned(Value::Bool(one == other)),
                    (one, other) => {
                        return Err(fail(format!(
                            "eq compares texts here, and not {} with {}",
                            kind(one),
                            kind(other)
                        )));
                    }
                },
            });
        }
        last.ok_or_else(|| fail("there is nothing between {{ and }}".to_owned()))
    }
}

fn error(file: &str, line: usize, text: String) -> Error {
    Error::Template {
        file: file.to_owned(),
        line,
        text,
    }
}

fn look<'v>(operand: &Operand, dot: &'v Value) -> Result<Cow<'v, Value>, String> {
    static NOTHING: Value = Value::Null;
    match operand {
        Operand::Text(text) => Ok(Cow::Owned(Value::String(text.clone()))),
        Operand::Path(path) => {
            let mut at = dot;
            for name in path {
                at = match at {
                    Value::Object(map) => map.get(name).unwrap_or(&NOTHING),
                    other => return Err(format!(".{} is looked for in {}", path.join("."), kind(other))),
                };
            }
            Ok(Cow::Borrowed(at))
        }
    }
}

fn is_true(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(bool) => *bool,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(list) => !list.is_empty(),
        Value::Object(map) => !map.is_empty(),
    }
}

fn printed(value: &Value) -> Result<String, String> {
    match value {
        Value::Null => Ok(String::new()),
        Value::String(text) => Ok(text.clone()),
        Value::Bool(_) | Value::Number(_) => Ok(value.to_string()),
        // Go would print map[...].
        other => Err(format!("{} cannot be printed here; toYaml can", kind(other))),
    }
}

/// As Go's `%q`.
fn quoted(text: &str) -> Result<String, String> {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            '\r' => out.push_str("\\r"),
            c if c.is_control() => return Err(format!("a text has the control character U+{:04X} in it", u32::from(c))),
            c => out.push(c),
        }
    }
    out.push('"');
    Ok(out)
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "a map",
    }
}

/// A position and what is wrong there.
type Wrong = (usize, String);

#[derive(Debug)]
enum Token<'a> {
    Text(&'a str),
    /// The line, and what is between the braces.
    Action(usize, &'a str),
}

/// Text and actions, white space taken away where a dash says so. Comments are gone.
fn tokens(text: &str) -> Result<Vec<Token<'_>>, Wrong> {
    let mut tokens = Vec::new();
    let mut rest = text;
    let mut line = 1;
    let mut trim_next = false;
    loop {
        let (before, after) = match rest.split_once("{{") {
            Some((before, after)) => (before, Some(after)),
            None => (rest, None),
        };
        let starts_trimmed = after.is_some_and(|after| after.starts_with("- ") || after.starts_with("-\n"));
        let mut shown = before;
        if trim_next {
            shown = shown.trim_start();
        }
        if starts_trimmed {
            shown = shown.trim_end();
        }
        if !shown.is_empty() {
            tokens.push(Token::Text(shown));
        }
        line += before.matches('\n').count();
        let Some(after) = after else { return Ok(tokens) };
        let Some((action, after)) = after.split_once("}}") else {
            return Err((line, "this {{ has no }}".to_owned()));
        };
        let mut inner = action;
        if starts_trimmed {
            inner = &inner[1..];
        }
        trim_next = inner.ends_with(" -") || inner.ends_with("\n-");
        if trim_next {
            inner = &inner[..inner.len() - 1];
        }
        let inner = inner.trim();
        let comment = inner.starts_with("/*");
        if comment && !inner.ends_with("*/") {
            return Err((line, "a comment ends with */}}".to_owned()));
        }
        if !comment {
            tokens.push(Token::Action(line, inner));
        }
        line += action.matches('\n').count();
        rest = after;
    }
}

struct Parser<'a> {
    tokens: std::iter::Peekable<std::vec::IntoIter<Token<'a>>>,
    defines: Vec<(usize, String, Vec<Node<'a>>)>,
}

/// `else` or `end`, and where.
type End = Option<(usize, &'static str)>;

impl<'a> Parser<'a> {
    /// Until `else` or `end`, or the end of the file where nothing was `opened`.
    fn block(&mut self, opened: Option<(usize, &str)>) -> Result<(Vec<Node<'a>>, End), Wrong> {
        let mut nodes = Vec::new();
        while let Some(token) = self.tokens.next() {
            let (line, action) = match token {
                Token::Text(text) => {
                    nodes.push(Node::Text(Cow::Borrowed(text)));
                    continue;
                }
                Token::Action(line, action) => (line, action),
            };
            let (word, rest) = action.split_once(char::is_whitespace).unwrap_or((action, ""));
            match word {
                "if" => {
                    let pipe = pipe(line, rest)?;
                    let (yes, no) = self.branches(line, "if")?;
                    nodes.push(Node::If(pipe, yes, no));
                }
                "with" => {
                    let pipe = pipe(line, rest)?;
                    let (yes, no) = self.branches(line, "with")?;
                    nodes.push(Node::With(pipe, yes, no));
                }
                "range" => {
                    let pipe = pipe(line, rest)?;
                    let (body, no) = self.branches(line, "range")?;
                    if !no.is_empty() {
                        return Err((line, "range with else is not understood".to_owned()));
                    }
                    nodes.push(Node::Range(pipe, body));
                }
                "define" => {
                    if opened.is_some() {
                        return Err((line, "a define stands alone and not inside of something".to_owned()));
                    }
                    let words = words(line, rest)?;
                    let [Word::Text(name)] = words.as_slice() else {
                        return Err((line, "a define has a name in double quotes".to_owned()));
                    };
                    let (body, no) = self.branches(line, "define")?;
                    if !no.is_empty() {
                        return Err((line, "a define has no else".to_owned()));
                    }
                    self.defines.push((line, name.clone(), body));
                }
                "else" if rest.is_empty() => return Ok((nodes, Some((line, "else")))),
                "end" if rest.is_empty() => return Ok((nodes, Some((line, "end")))),
                _ => nodes.push(Node::Print(pipe(line, action)?)),
            }
        }
        match opened {
            Some((line, what)) => Err((line, format!("this {what} has no end"))),
            None => Ok((nodes, None)),
        }
    }

    fn branches(&mut self, line: usize, what: &str) -> Result<(Vec<Node<'a>>, Vec<Node<'a>>), Wrong> {
        let (yes, end) = self.block(Some((line, what)))?;
        if !matches!(end, Some((_, "else"))) {
            return Ok((yes, Vec::new()));
        }
        let (no, end) = self.block(Some((line, what)))?;
        match end {
            Some((line, "else")) => Err((line, format!("this {what} has two else"))),
            _ => Ok((yes, no)),
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Word {
    Plain(String),
    Text(String),
    Bar,
}

fn words(line: usize, text: &str) -> Result<Vec<Word>, Wrong> {
    let mut words = Vec::new();
    let mut rest = text.trim_start();
    while !rest.is_empty() {
        if let Some(after) = rest.strip_prefix('"') {
            let Some((inner, after)) = after.split_once('"') else {
                return Err((line, format!("a text has no end: {rest}")));
            };
            if inner.contains('\\') {
                return Err((line, "texts with a backslash are not understood".to_owned()));
            }
            words.push(Word::Text(inner.to_owned()));
            rest = after;
        } else if let Some(after) = rest.strip_prefix('|') {
            words.push(Word::Bar);
            rest = after;
        } else {
            let end = rest.find([' ', '\t', '\n', '|', '"']).unwrap_or(rest.len());
            words.push(Word::Plain(rest[..end].to_owned()));
            rest = &rest[end..];
        }
        rest = rest.trim_start();
    }
    Ok(words)
}

fn pipe(line: usize, text: &str) -> Result<Pipe, Wrong> {
    let words = words(line, text)?;
    let mut calls = Vec::new();
    for (nth, words) in words.split(|word| *word == Word::Bar).enumerate() {
        calls.push(call(words, nth > 0).ok_or_else(|| (line, format!("{{{{ {text} }}}} is not understood: {UNDERSTOOD}")))?);
    }
    Ok(Pipe { line, calls })
}

fn call(words: &[Word], piped: bool) -> Option<Call> {
    let (first, rest) = words.split_first()?;
    let function = match first {
        Word::Plain(word) if !word.starts_with('.') => word.as_str(),
        _ if rest.is_empty() && !piped => return Some(Call::Value(operand(first)?)),
        _ => return None,
    };
    // The argument that a pipe gives, too.
    let last = |rest: &[Word]| match (rest, piped) {
        ([], true) => Some(None),
        ([word], false) => Some(Some(operand(word)?)),
        _ => None,
    };
    match (function, rest) {
        ("include", [Word::Text(name), argument]) if !piped => Some(Call::Include(name.clone(), operand(argument)?)),
        ("toYaml", rest) => Some(Call::ToYaml(last(rest)?)),
        ("nindent", [Word::Plain(spaces), rest @ ..]) => Some(Call::Nindent(spaces.parse().ok()?, last(rest)?)),
        ("quote", rest) => Some(Call::Quote(last(rest)?)),
        ("fail", [Word::Text(why)]) if !piped => Some(Call::Fail(why.clone())),
        ("eq", [one, other]) if !piped => Some(Call::Eq(operand(one)?, operand(other)?)),
        ("default", [otherwise, rest @ ..]) => Some(Call::Default(operand(otherwise)?, last(rest)?)),
        _ => None,
    }
}

fn operand(word: &Word) -> Option<Operand> {
    match word {
        Word::Text(text) => Some(Operand::Text(text.clone())),
        Word::Plain(word) => {
            let path = word.strip_prefix('.')?;
            if path.is_empty() {
                return Some(Operand::Path(Vec::new()));
            }
            let is_name = |name: &str| !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
            let names: Vec<String> = path.split('.').map(str::to_owned).collect();
            names.iter().all(|name| is_name(name)).then_some(Operand::Path(names))
        }
        Word::Bar => None,
    }
}

impl Templates<'_> {
    /// Every path below `.Values` that is named from where `.` is the root, with file and line: for the test that all of them exist.
    #[cfg(test)]
    pub(super) fn value_paths(&self) -> Vec<(String, Vec<String>)> {
        fn walk(nodes: &[Node<'_>], found: &mut Vec<Vec<String>>) {
            for node in nodes {
                let (pipe, branches): (&Pipe, Vec<&Vec<Node<'_>>>) = match node {
                    Node::Text(_) => continue,
                    Node::Print(pipe) => (pipe, Vec::new()),
                    Node::If(pipe, yes, no) | Node::With(pipe, yes, no) => (pipe, vec![yes, no]),
                    Node::Range(pipe, body) => (pipe, vec![body]),
                };
                for call in &pipe.calls {
                    let operands = match call {
                        Call::Value(one) | Call::Include(_, one) => vec![one],
                        Call::Fail(_) => Vec::new(),
                        Call::Eq(one, other) => vec![one, other],
                        Call::Default(one, other) => std::iter::once(one).chain(other).collect(),
                        Call::ToYaml(one) | Call::Nindent(_, one) | Call::Quote(one) => one.iter().collect(),
                    };
                    for operand in operands {
                        if let Operand::Path(path) = operand
                            && path.first().is_some_and(|name| name == "Values")
                        {
                            found.push(path[1..].to_vec());
                        }
                    }
                }
                for branch in branches {
                    walk(branch, found);
                }
            }
        }
        let mut all = Vec::new();
        let files = self.files.iter().map(|(file, nodes)| (*file, nodes));
        let defines = self.defines.values().map(|(file, nodes)| (*file, nodes));
        for (file, nodes) in files.chain(defines) {
            let mut found = Vec::new();
            walk(nodes, &mut found);
            all.extend(found.into_iter().map(|path| (file.to_owned(), path)));
        }
        all
    }
}
