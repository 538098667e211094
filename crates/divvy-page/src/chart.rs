//! Lines over time, as SVG. A text says the same.

use maud::{Markup, html};

/// The size of a chart in its own units. The style sheet decides how large it is on the page.
const WIDTH: u64 = 600;
const HEIGHT: u64 = 80;

/// Draw values over time: `(time, value)`, the oldest first. Where times are missing, the line has a gap. `limit` is a dashed line.
pub(crate) fn line(points: &[(u64, u64)], from: u64, to: u64, most: u64, limit: Option<u64>, alternative: &str) -> Markup {
    let x = |time: u64| scale(time.saturating_sub(from), to.saturating_sub(from), WIDTH);
    let y = |value: u64| HEIGHT - scale(value, most, HEIGHT);
    html! {
        svg.chart role="img" aria-label=(alternative) viewBox={ "0 -2 " (WIDTH) " " (HEIGHT + 4) } preserveAspectRatio="none" {
            line.base x1="0" x2=(WIDTH) y1=(HEIGHT) y2=(HEIGHT) {}
            @if let Some(limit) = limit { line.limit x1="0" x2=(WIDTH) y1=(y(limit)) y2=(y(limit)) {} }
            @for run in runs(points) {
                @let path: Vec<String> = run.iter().map(|(time, value)| format!("{} {}", x(*time), y(*value))).collect();
                @let ends = (run.first().map_or(0, |point| x(point.0)), run.last().map_or(0, |point| x(point.0)));
                path.area d={ "M" (ends.0) " " (HEIGHT) "L" (path.join("L")) "L" (ends.1) " " (HEIGHT) "Z" } {}
                // A single point is a short stroke.
                path.line d={ "M" (path.join("L")) @if run.len() == 1 { "h1" } } {}
            }
        }
    }
}

fn scale(value: u64, most: u64, size: u64) -> u64 {
    let scaled = u128::from(value.min(most)) * u128::from(size);
    u64::try_from(scaled.checked_div(u128::from(most)).unwrap_or(0)).unwrap_or(size)
}

/// Divide points where times are missing.
fn runs(points: &[(u64, u64)]) -> impl Iterator<Item = &[(u64, u64)]> {
    points.chunk_by(|earlier, later| later.0.saturating_sub(earlier.0) <= 1)
}

/// Return the least, the greatest, and the last value.
pub(crate) fn in_words(points: &[(u64, u64)], text: impl Fn(u64) -> String) -> String {
    let values = || points.iter().map(|point| point.1);
    match (values().min(), values().max(), values().next_back()) {
        (Some(least), Some(most), Some(last)) => format!("between {} and {}, last {}", text(least), text(most), text(last)),
        _ => "not measured".to_owned(),
    }
}
