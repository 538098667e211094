use std::fmt::Write as _;

/// The size of the drawing in pixels; a viewer scales it.
pub(super) const WIDTH: f64 = 760.0;
pub(super) const HEIGHT: f64 = 380.0;
/// The position of the plot within the drawing.
pub(super) const LEFT: f64 = 64.0;
pub(super) const RIGHT: f64 = WIDTH - 20.0;
pub(super) const TOP: f64 = 78.0;
pub(super) const BOTTOM: f64 = HEIGHT - 52.0;

/// Colors that color-blind people can distinguish (Okabe and Ito), with a dash pattern for each.
const COLOURS: [(&str, &str); 9] = [
    ("#999999", "2 3"),
    ("#56b4e9", "6 3"),
    ("#009e73", "5 2 1 2"),
    ("#cc79a7", "8 3 2 3"),
    ("#e69f00", "4 2"),
    ("#b8860b", "1 2"),
    ("#0072b2", ""),
    ("#8a63d2", "10 3"),
    ("#d55e00", ""),
];

pub(super) fn colour(number: usize) -> &'static str {
    COLOURS[number % COLOURS.len()].0
}

pub(super) fn dashes(number: usize) -> &'static str {
    COLOURS[number % COLOURS.len()].1
}

/// Escape a text for use between tags and in attributes.
pub(super) fn escape(text: &str) -> String {
    let escaped = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    escaped.replace('"', "&quot;")
}

/// Format a number without superfluous zeros.
pub(super) fn number(value: f64) -> String {
    let text = format!("{value:.2}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0".to_owned() } else { text.to_owned() }
}

/// A drawing that is being built.
pub(super) struct Drawing(String);

impl Drawing {
    pub(super) fn new(title: &str) -> Drawing {
        let mut text = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" role=\"img\" \
             font-family=\"system-ui, sans-serif\" font-size=\"13\">\n<title>{}</title>\n",
            escape(title)
        );
        // Presentation attributes apply where style sheets are not supported.
        text.push_str(
            "<style>.ground{fill:#fff}.text{fill:#222}.grid{stroke:#ddd}.axis{stroke:#888}\n\
             @media (prefers-color-scheme:dark){.ground{fill:#16181c}.text{fill:#ddd}.grid{stroke:#333}.axis{stroke:#999}}</style>\n",
        );
        let mut drawing = Drawing(text);
        drawing.put(&format!(
            "<rect class=\"ground\" width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#fff\"/>"
        ));
        drawing.text(LEFT, 22.0, "start", 15, title);
        drawing
    }

    pub(super) fn put(&mut self, element: &str) {
        self.0.push_str(element);
        self.0.push('\n');
    }

    pub(super) fn text(&mut self, x: f64, y: f64, anchor: &str, size: u32, text: &str) {
        self.put(&format!(
            "<text class=\"text\" fill=\"#222\" x=\"{}\" y=\"{}\" text-anchor=\"{anchor}\" font-size=\"{size}\">{}</text>",
            number(x),
            number(y),
            escape(text)
        ));
    }

    pub(super) fn rule(&mut self, class: &str, from: (f64, f64), to: (f64, f64)) {
        let stroke = if class == "grid" { "#ddd" } else { "#888" };
        self.put(&format!(
            "<line class=\"{class}\" stroke=\"{stroke}\" x1=\"{}\" y1=\"{}\" x2=\"{}\" y2=\"{}\"/>",
            number(from.0),
            number(from.1),
            number(to.0),
            number(to.1)
        ));
    }

    /// Draw the legend below the title.
    pub(super) fn legend<'a>(&mut self, names: impl Iterator<Item = (&'a str, usize)>, filled: bool) {
        let (mut x, mut y) = (LEFT, 41.0);
        for (name, of) in names {
            let colour = colour(of);
            // The font is not known here; this width is enough for the widest.
            let wide = 29.0 + 7.5 * name.chars().count() as f64;
            if x > LEFT && x + wide > RIGHT {
                (x, y) = (LEFT, y + 18.0);
            }
            if filled {
                self.put(&format!(
                    "<rect x=\"{}\" y=\"{}\" width=\"14\" height=\"10\" fill=\"{colour}\"/>",
                    number(x + 5.0),
                    number(y - 5.0)
                ));
            } else {
                self.put(&format!(
                    "<line x1=\"{}\" y1=\"{}\" x2=\"{}\" y2=\"{}\" stroke=\"{colour}\" stroke-width=\"2.5\" stroke-dasharray=\"{}\"/>",
                    number(x),
                    number(y),
                    number(x + 24.0),
                    number(y),
                    dashes(of)
                ));
            }
            self.text(x + 29.0, y + 4.0, "start", 12, name);
            x += wide + 14.0;
        }
    }

    /// Draw the vertical axis with its grid, and the frame.
    pub(super) fn vertical(&mut self, axis: &Axis, label: &str) {
        for tick in axis.ticks() {
            let y = axis.at(tick);
            self.rule("grid", (LEFT, y), (RIGHT, y));
            self.text(LEFT - 8.0, y + 4.0, "end", 12, &number(tick));
        }
        self.rule("axis", (LEFT, BOTTOM), (RIGHT, BOTTOM));
        let middle = number((TOP + BOTTOM) / 2.0);
        self.put(&format!(
            "<text class=\"text\" fill=\"#222\" transform=\"translate(16 {middle}) rotate(-90)\" text-anchor=\"middle\" font-size=\"12\">{}</text>",
            escape(label)
        ));
    }

    pub(super) fn finish(mut self) -> String {
        self.0.push_str("</svg>\n");
        self.0
    }
}

/// The scale of an axis.
#[derive(Debug, Clone, Copy)]
pub(super) struct Axis {
    pub(super) least: f64,
    pub(super) most: f64,
    pub(super) from: f64,
    pub(super) to: f64,
}

impl Axis {
    pub(super) fn at(&self, value: f64) -> f64 {
        let span = self.most - self.least;
        let part = if span > 0.0 { (value - self.least) / span } else { 0.0 };
        self.from + part * (self.to - self.from)
    }

    /// Return up to eight round numbers on the axis.
    pub(super) fn ticks(&self) -> Vec<f64> {
        let step = step((self.most - self.least) / 8.0);
        let first = (self.least / step - 1e-9).ceil();
        let last = (self.most / step + 1e-9).floor();
        let count = (last - first).clamp(0.0, 50.0) as u32;
        (0..=count).map(|tick| (first + f64::from(tick)) * step).collect()
    }
}

/// Return the next larger number of the form 1, 2, or 5 times a power of ten.
pub(super) fn step(least: f64) -> f64 {
    if least.is_nan() || least <= 0.0 {
        return 1.0;
    }
    let power = 10_f64.powf(least.log10().floor());
    let times = [1.0, 2.0, 5.0, 10.0].into_iter().find(|times| times * power >= least - 1e-12);
    times.unwrap_or(10.0) * power
}

/// Format points as `x,y` pairs.
pub(super) fn path(points: impl Iterator<Item = (f64, f64)>) -> String {
    let mut text = String::new();
    for (x, y) in points {
        if !text.is_empty() {
            text.push(' ');
        }
        // Writing to a String never fails.
        let _ = write!(text, "{},{}", number(x), number(y));
    }
    text
}
