// SPDX-License-Identifier: GPL-2.0
/*
 * Notices when a file loses blocks, and when its inode leaves the cache.
 *
 * File systems call unmap_mapping_pages() or unmap_mapping_range() before they free blocks of a
 * file, whether or not a process maps it. A table without a mount has no VMA through which it would
 * hear of that. So the module has ftrace call it at the beginning of both functions, and of
 * clear_inode(), by which every inode is evicted. The calls are permanent: ftrace refuses to be
 * switched off while they are registered.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/ftrace.h>
#include <linux/mm.h>

#include "dax/dax.h"

static void notrace dax_watch_pages(unsigned long ip, unsigned long parent, struct ftrace_ops *ops,
				    struct ftrace_regs *traced)
{
	struct pt_regs *regs = ftrace_get_regs(traced);

	if (regs)
		dax_table_notice((void *)regs_get_kernel_argument(regs, 0),
				 regs_get_kernel_argument(regs, 1),
				 regs_get_kernel_argument(regs, 2) ?: U64_MAX);
}

static void notrace dax_watch_range(unsigned long ip, unsigned long parent, struct ftrace_ops *ops,
				    struct ftrace_regs *traced)
{
	struct pt_regs *regs = ftrace_get_regs(traced);
	u64 length;

	if (!regs)
		return;
	length = regs_get_kernel_argument(regs, 2);
	dax_table_notice((void *)regs_get_kernel_argument(regs, 0),
			 regs_get_kernel_argument(regs, 1) >> PAGE_SHIFT,
			 DIV_ROUND_UP(length, PAGE_SIZE) ?: U64_MAX);
}

static void notrace dax_watch_inode(unsigned long ip, unsigned long parent, struct ftrace_ops *ops,
				    struct ftrace_regs *traced)
{
	struct pt_regs *regs = ftrace_get_regs(traced);
	struct inode *inode;

	if (!regs)
		return;
	inode = (void *)regs_get_kernel_argument(regs, 0);
	/* The mapping of a file that has a table is a part of its own inode. */
	dax_table_evict(&inode->i_data);
}

static struct ftrace_ops dax_watchers[] = {
	{
		.func = dax_watch_pages,
		.flags = FTRACE_OPS_FL_SAVE_REGS | FTRACE_OPS_FL_RECURSION |
			 FTRACE_OPS_FL_PERMANENT,
	},
	{
		.func = dax_watch_range,
		.flags = FTRACE_OPS_FL_SAVE_REGS | FTRACE_OPS_FL_RECURSION |
			 FTRACE_OPS_FL_PERMANENT,
	},
	{
		.func = dax_watch_inode,
		.flags = FTRACE_OPS_FL_SAVE_REGS | FTRACE_OPS_FL_RECURSION |
			 FTRACE_OPS_FL_PERMANENT,
	},
};

static char *dax_watched[] = { "unmap_mapping_pages", "unmap_mapping_range", "clear_inode" };

static void dax_watch_stop(unsigned int count)
{
	while (count--) {
		unregister_ftrace_function(&dax_watchers[count]);
		ftrace_free_filter(&dax_watchers[count]);
	}
}

int dax_watch_start(void)
{
	unsigned int i;
	int error = 0;

	for (i = 0; !error && i < ARRAY_SIZE(dax_watchers); i++) {
		error = ftrace_set_filter(&dax_watchers[i], dax_watched[i], strlen(dax_watched[i]),
					  1);
		if (!error)
			error = register_ftrace_function(&dax_watchers[i]);
		if (error) {
			ftrace_free_filter(&dax_watchers[i]);
			dax_watch_stop(i);
		}
	}
	return error;
}

void dax_watch_end(void)
{
	dax_watch_stop(ARRAY_SIZE(dax_watchers));
}
