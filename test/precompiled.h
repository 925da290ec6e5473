// dev/precompiled.h and GoogleTest, for tests.
#pragma once

#include <gtest/gtest.h>

#include "dev/precompiled.h"
