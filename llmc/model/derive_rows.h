// Makes a part's lists of generation: the forward pass of a few rows of one sequence, which follow those that a cache knows.
// They take no memory of their own; the cache is where a training step keeps what keys and values are part of. Ranks that
// share the layers each compute the whole rows, also where they divide the tokens of a training step.
#pragma once

#include "llmc/model/place_calls.h"

namespace llmc {

// Of a part whose forward pass has been drafted, and what it keeps been placed.
void derive_rows(PartLists& lists, Drafting& draft, Placing& placing);

}  // namespace llmc
