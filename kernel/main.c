// SPDX-License-Identifier: GPL-2.0
/*
 * Vellum: explicit virtual memory.
 *
 * The module starts its parts in the order in which they stand here. The parts that any program can
 * reach start last: a program that has one of them open does not keep a module whose start fails.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/debugfs.h>
#include <linux/module.h>
#include <asm/cpufeature.h>

#include "core/pt_flush.h"
#include "core/pt_secondary.h"
#include "core/pt_tree.h"
#include "core/pt_userfault.h"
#include "dax/dax.h"
#include "exmap/exmap.h"
#include "morsel/morsel.h"

#define CREATE_TRACE_POINTS
#include "trace.h"

/* Holds the self-checks: /sys/kernel/debug/vellum. */
static struct dentry *vellum_debugfs;

static int __init vellum_init(void)
{
	int error;

	/*
	 * The hypervisor writes the page tables of a PV domain, and a store by the module has no
	 * effect.
	 */
	if (cpu_feature_enabled(X86_FEATURE_XENPV)) {
		pr_err("Xen PV domains are not supported\n");
		return -ENODEV;
	}
	error = pt_flush_init();
	if (error)
		return error;
	pt_secondary_init();
	pt_userfault_init();
	error = pt_tree_start();
	if (error)
		goto no_trees;
	vellum_debugfs = debugfs_create_dir("vellum", NULL);
	error = morsel_init(vellum_debugfs);
	if (error)
		goto no_morsels;
	error = dax_init(vellum_debugfs);
	if (error)
		goto no_tables;
	error = exmap_init(vellum_debugfs);
	if (error)
		goto no_exmaps;
	return 0;
no_exmaps:
	dax_exit();
no_tables:
	morsel_exit();
no_morsels:
	debugfs_remove_recursive(vellum_debugfs);
	pt_tree_end();
no_trees:
	pt_userfault_exit();
	return error;
}

static void __exit vellum_exit(void)
{
	debugfs_remove_recursive(vellum_debugfs);
	exmap_exit();
	dax_exit();
	morsel_exit();
	pt_tree_end();
	pt_userfault_exit();
}

module_init(vellum_init);
module_exit(vellum_exit);

MODULE_DESCRIPTION("Explicit virtual memory: page tables that programs own");
MODULE_LICENSE("GPL");
