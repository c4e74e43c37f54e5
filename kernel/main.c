// SPDX-License-Identifier: GPL-2.0
/* Vellum: explicit virtual memory. What the module offers, in the order in which it starts. */

#include <linux/module.h>

#include "core/pt_flush.h"
#include "exmap/exmap.h"

#define CREATE_TRACE_POINTS
#include "trace.h"

static int __init vellum_init(void)
{
	int error = pt_flush_init();

	return error ? error : exmap_init();
}

static void __exit vellum_exit(void)
{
	exmap_exit();
}

module_init(vellum_init);
module_exit(vellum_exit);

MODULE_DESCRIPTION("Explicit virtual memory: page tables that programs own");
MODULE_LICENSE("GPL");
