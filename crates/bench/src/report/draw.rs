//! Charts as SVG.

use anyhow::{Result, anyhow};
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;

use super::{Axis, Chart, text};

/// Width and height in pixels of the drawing; the page scales it.
const SIZE: (u32, u32) = (760, 420);

/// Colours that are told apart by most eyes, in print too (Okabe and Ito).
const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 0, 0),
    RGBColor(150, 150, 150),
];

/// A chart as an SVG element; points that no axis can show are left out.
///
/// # Errors
/// If drawing fails.
pub fn svg(chart: &Chart) -> Result<String> {
    let x = range(chart, &chart.x, |point| point.0, false);
    let y = range(chart, &chart.y, |point| point.1, !chart.y.logarithmic);
    match (chart.x.logarithmic, chart.y.logarithmic) {
        (false, false) => draw(chart, x.0..x.1, y.0..y.1),
        (true, false) => draw(chart, (x.0..x.1).log_scale(), y.0..y.1),
        (false, true) => draw(chart, x.0..x.1, (y.0..y.1).log_scale()),
        (true, true) => draw(chart, (x.0..x.1).log_scale(), (y.0..y.1).log_scale()),
    }
}

/// Whether an axis can show a value.
fn shows(axis: &Axis, value: f64) -> bool {
    value.is_finite() && (!axis.logarithmic || value > 0.0)
}

/// What an axis spans: all values, with some room.
fn range(chart: &Chart, axis: &Axis, of: fn(&(f64, f64)) -> f64, from_zero: bool) -> (f64, f64) {
    let points = chart.lines.iter().flat_map(|line| line.points.iter().map(of));
    let (mut low, mut high) = points
        .filter(|value| shows(axis, *value))
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
            (low.min(value), high.max(value))
        });
    if low > high {
        (low, high) = (1.0, 2.0);
    }
    if from_zero {
        low = low.min(0.0);
    }
    if low == high {
        (low, high) =
            if axis.logarithmic { (low / 2.0, high * 2.0) } else { (low - 1.0, high + 1.0) };
    }
    match (axis.logarithmic, from_zero) {
        (true, _) => (low / 1.1, high * 1.1),
        (false, true) => (low, high + (high - low) * 0.05),
        (false, false) => (low, high),
    }
}

fn draw<X, Y>(chart: &Chart, x: X, y: Y) -> Result<String>
where
    X: AsRangedCoord<Value = f64>,
    Y: AsRangedCoord<Value = f64>,
    X::CoordDescType: ValueFormatter<f64>,
    Y::CoordDescType: ValueFormatter<f64>,
{
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        area.fill(&WHITE).map_err(failed)?;
        let mut canvas = ChartBuilder::on(&area)
            .caption(&chart.title, ("sans-serif", 18))
            .margin(10)
            .x_label_area_size(42)
            .y_label_area_size(78)
            .build_cartesian_2d(x, y)
            .map_err(failed)?;
        canvas
            .configure_mesh()
            .x_desc(&chart.x.label)
            .y_desc(&chart.y.label)
            .x_label_formatter(&|value| text::number(*value))
            .y_label_formatter(&|value| text::number(*value))
            .light_line_style(WHITE)
            .draw()
            .map_err(failed)?;
        for (line, colour) in chart.lines.iter().zip(COLOURS.iter().cycle()) {
            let visible =
                |point: &&(f64, f64)| shows(&chart.x, point.0) && shows(&chart.y, point.1);
            let points: Vec<(f64, f64)> = line.points.iter().filter(visible).copied().collect();
            let style = colour.stroke_width(2);
            canvas
                .draw_series(LineSeries::new(points.iter().copied(), style).point_size(3))
                .map_err(failed)?
                .label(&line.name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
        }
        canvas
            .configure_series_labels()
            .background_style(WHITE.mix(0.8))
            .border_style(RGBColor(200, 200, 200))
            .position(SeriesLabelPosition::UpperRight)
            .draw()
            .map_err(failed)?;
        area.present().map_err(failed)?;
    }
    Ok(text)
}

fn failed(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("{error}")
}
