// SPDX-License-Identifier: GPL-2.0
/* Vellum: explicit virtual memory. What the module offers, in the order in which it starts. */

#include <linux/debugfs.h>
#include <linux/module.h>

#include "core/pt_flush.h"
#include "core/pt_secondary.h"
#include "core/pt_tree.h"
#include "core/pt_userfault.h"
#include "exmap/exmap.h"
#include "morsel/morsel.h"

#define CREATE_TRACE_POINTS
#include "trace.h"

/* Where the self-checks are: /sys/kernel/debug/vellum. */
static struct dentry *folder;

static int __init vellum_init(void)
{
	int error = pt_flush_init();

	if (error)
		return error;
	pt_secondary_init();
	pt_userfault_init();
	error = pt_tree_start();
	if (error)
		goto no_trees;
	folder = debugfs_create_dir("vellum", NULL);
	error = exmap_init(folder);
	if (error)
		goto no_exmap;
	error = morsel_init(folder);
	if (error)
		goto no_morsels;
	return 0;
no_morsels:
	exmap_exit();
no_exmap:
	debugfs_remove_recursive(folder);
	pt_tree_end();
no_trees:
	pt_userfault_exit();
	return error;
}

static void __exit vellum_exit(void)
{
	debugfs_remove_recursive(folder);
	morsel_exit();
	exmap_exit();
	pt_tree_end();
	pt_userfault_exit();
}

module_init(vellum_init);
module_exit(vellum_exit);

MODULE_DESCRIPTION("Explicit virtual memory: page tables that programs own");
MODULE_LICENSE("GPL");
