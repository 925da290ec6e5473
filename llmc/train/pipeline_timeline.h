// Draws a Timeline, simulated or measured: for a terminal, as a picture, and for a trace viewer. What is drawn is text;
// where it goes is the caller's. `title` is a line that says what it is: "1f1b, 4 stages, 8 micro-batches, simulated".
#pragma once

#include <string>
#include <string_view>

#include "llmc/parallel/pipeline_simulation.h"

namespace llmc {

// "27.3% idle over total, 37.5% idle over useful"
std::string to_string(const Bubble& bubble);

// A row a stage, at most `columns` wide, with the number of a pass's micro-batch where it fits; then an axis, what is
// what, the bubble, and the most micro-batches whose activations each stage holds. Passes are told apart by colours, or
// without them by letters and by what fills them; those of a stage's chunks too, up to eight.
std::string timeline_chart(const Timeline& timeline, std::string_view title, int columns, bool colours);

// A picture that stands alone, for light and dark backgrounds. Passes of later chunks of a stage are lighter; each says
// what it is and when it ran under the pointer. To the right of each stage: its idle time, and the most micro-batches
// whose activations it holds.
std::string timeline_svg(const Timeline& timeline, std::string_view title);

// The Trace Event Format (JSON), which chrome://tracing and ui.perfetto.dev open: a thread a stage.
std::string timeline_trace(const Timeline& timeline, std::string_view title);

}  // namespace llmc
