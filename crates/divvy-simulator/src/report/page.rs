use super::svg::escape;

/// An HTML page that needs no other files.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Page {
    /// The page's title.
    pub title: String,
    /// What was run, and on which data; one paragraph each.
    pub about: Vec<String>,
    /// The command that creates this page.
    pub command: String,
    /// The table: the names of the columns, and the rows.
    pub table: (Vec<String>, Vec<Vec<String>>),
    /// A note below the table.
    pub note: String,
    /// The plots as SVG, each with a sentence on how to read it.
    pub plots: Vec<(String, String)>,
}

const STYLE: &str = "\
:root{color-scheme:light dark}\n\
body{font:15px/1.5 system-ui,sans-serif;max-width:800px;margin:2em auto;padding:0 1em;background:#fff;color:#222}\n\
pre{background:#f3f3f3;padding:.7em;white-space:pre-wrap;overflow-wrap:anywhere}\n\
table{border-collapse:collapse;display:block;overflow-x:auto}th,td{padding:.25em .8em;border-bottom:1px solid #ddd;text-align:right}\n\
th:first-child,td:first-child{text-align:left}figure{margin:2em 0}svg{max-width:100%;height:auto}figcaption{color:#555}\n\
@media (prefers-color-scheme:dark){body{background:#16181c;color:#ddd}pre{background:#23262b}th,td{border-color:#333}figcaption{color:#aaa}}\n";

impl Page {
    /// Return the page as HTML.
    pub fn html(&self) -> String {
        let title = escape(&self.title);
        let mut html = format!(
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        );
        for paragraph in &self.about {
            html.push_str(&format!("<p>{}</p>\n", escape(paragraph)));
        }
        html.push_str(&format!("<pre>{}</pre>\n", escape(&self.command)));
        let row = |cells: &[String], tag: &str| {
            let cells = cells.iter().map(|cell| format!("<{tag}>{}</{tag}>", escape(cell)));
            format!("<tr>{}</tr>\n", cells.collect::<String>())
        };
        let (names, rows) = &self.table;
        let rows = rows.iter().map(|cells| row(cells, "td")).collect::<String>();
        html.push_str(&format!("<table>\n{}{rows}</table>\n", row(names, "th")));
        html.push_str(&format!("<p>{}</p>\n", escape(&self.note)));
        for (svg, caption) in &self.plots {
            html.push_str(&format!(
                "<figure>\n{svg}<figcaption>{}</figcaption>\n</figure>\n",
                escape(caption)
            ));
        }
        html.push_str("</body>\n</html>\n");
        html
    }
}
