// dev/precompiled.h, for tests.
#pragma once

#include <gtest/gtest.h>

#include "dev/precompiled.h"
