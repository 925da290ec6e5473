// Draws a Timeline, simulated or measured: for a terminal, as an SVG picture, or for a trace viewer. Each
// function returns text. `title` is one line that says what is drawn: "1f1b, 4 stages, 8 micro-batches,
// simulated".
#pragma once

#include <string>
#include <string_view>

#include "llmc/parallel/pipeline/pipeline_simulation.h"

namespace llmc {

// "27.3% of all time, 37.5% of the useful time"
std::string to_string(const Bubble& bubble);

// A chart for a terminal, at most `columns` wide. Each stage has a row; a pass shows its micro-batch's number
// if it fits. Below are an axis, a legend, the bubble, and for each stage the largest number of micro-batches
// whose activations it holds. Colours, or letters and fill characters, distinguish the kinds of passes and
// the chunks of a stage: up to four chunks with colours, eight without.
std::string timeline_chart(const Timeline& timeline, std::string_view title, int columns, bool colours);

// A self-contained SVG picture for light and dark backgrounds. Passes of later chunks of a stage are lighter.
// The tooltip of a pass says what it is and when it ran. To the right of each stage are its idle time and the
// most micro-batches whose activations it holds.
std::string timeline_svg(const Timeline& timeline, std::string_view title);

// The Trace Event Format (JSON), for chrome://tracing and ui.perfetto.dev: one thread per stage.
std::string timeline_trace(const Timeline& timeline, std::string_view title);

}  // namespace llmc
