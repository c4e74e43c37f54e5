/* Shared by the tests in C. Each defines LAST_ERROR, its header's words for the last error. */
#include <stdio.h>
#include <unistd.h>

/* Ends the process, which may be the child of a fork, without the handlers of exit(). */
#define CHECK(condition)                                                                   \
	do {                                                                               \
		if (!(condition)) {                                                        \
			fprintf(stderr, "line %d: %s; last error: %s\n", __LINE__,         \
				#condition, LAST_ERROR());                                 \
			_exit(1);                                                          \
		}                                                                          \
	} while (0)
