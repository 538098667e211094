use super::Series;
use super::svg::{Axis, BOTTOM, Drawing, LEFT, RIGHT, TOP, colour, dashes, number, path, step};

/// A line chart.
#[derive(Debug, Clone, PartialEq)]
pub struct Lines {
    /// The title above the plot.
    pub title: String,
    /// The label of the horizontal axis.
    pub across: String,
    /// The label of the vertical axis.
    pub up: String,
    /// The range of the horizontal axis; points outside are omitted.
    pub range: (f64, f64),
    /// The points of each series, in ascending order.
    pub series: Vec<Series<Vec<(f64, f64)>>>,
    /// Whether the points are marked, which helps if a line has few points.
    pub marks: bool,
}

impl Lines {
    /// Return the chart as SVG.
    pub fn svg(&self) -> String {
        let mut drawing = Drawing::new(&self.title);
        drawing.legend(self.series.iter().map(|one| (one.name.as_str(), one.colour)), false);
        let inside = |point: &&(f64, f64)| (self.range.0..=self.range.1).contains(&point.0);
        let shown = |values: &[(f64, f64)]| values.iter().filter(inside).copied().collect::<Vec<_>>();
        let heights: Vec<f64> = self
            .series
            .iter()
            .flat_map(|one| shown(&one.values))
            .map(|(_, y)| y)
            .collect();
        let least = heights.iter().copied().fold(f64::INFINITY, f64::min);
        let most = heights.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let (least, most) = if heights.is_empty() { (0.0, 1.0) } else { (least, most) };
        let round = step(((most - least) / 8.0).max(1e-6));
        let up = Axis {
            least: (least / round + 1e-9).floor() * round,
            most: ((most / round - 1e-9).ceil() * round).max(least + 1e-9),
            from: BOTTOM,
            to: TOP,
        };
        let across = Axis {
            least: self.range.0,
            most: self.range.1,
            from: LEFT,
            to: RIGHT,
        };
        drawing.vertical(&up, &self.up);
        for tick in across.ticks() {
            let x = across.at(tick);
            drawing.rule("axis", (x, BOTTOM), (x, BOTTOM + 5.0));
            drawing.text(x, BOTTOM + 19.0, "middle", 12, &number(tick));
        }
        drawing.text((LEFT + RIGHT) / 2.0, BOTTOM + 40.0, "middle", 12, &self.across);
        for one in &self.series {
            let points: Vec<(f64, f64)> = shown(&one.values)
                .into_iter()
                .map(|(x, y)| (across.at(x), up.at(y)))
                .collect();
            let colour = colour(one.colour);
            drawing.put(&format!(
                "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" stroke-dasharray=\"{}\" points=\"{}\"/>",
                dashes(one.colour),
                path(points.iter().copied())
            ));
            for (x, y) in points.iter().filter(|_| self.marks) {
                drawing.put(&format!(
                    "<circle cx=\"{}\" cy=\"{}\" r=\"3.5\" fill=\"{colour}\"/>",
                    number(*x),
                    number(*y)
                ));
            }
        }
        drawing.finish()
    }
}
