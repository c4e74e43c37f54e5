// SPDX-License-Identifier: GPL-2.0
/*
 * Self-check: /sys/kernel/debug/vellum/morsels has a line for each Morsel, with all that does not
 * add up. While the Morsel is in use the sums may differ by pages that are coming or going.
 */

#include <linux/debugfs.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/seq_file.h>

#include "morsel/morsel.h"

static LIST_HEAD(morsel_list);
static DEFINE_MUTEX(morsel_list_lock);	/* protects the list, and keeps its Morsels */

void morsel_register(struct morsel *morsel)
{
	mutex_lock(&morsel_list_lock);
	list_add_tail(&morsel->node, &morsel_list);
	mutex_unlock(&morsel_list_lock);
}

void morsel_unregister(struct morsel *morsel)
{
	mutex_lock(&morsel_list_lock);
	list_del(&morsel->node);
	mutex_unlock(&morsel_list_lock);
}

static void morsel_check_count(void *count, u64 page, pteval_t leaf)
{
	++*(u64 *)count;
}

static void morsel_check_show_one(struct seq_file *out, struct morsel *morsel)
{
	u64 found = 0;

	if (!morsel_is_shaped(morsel))
		return;
	pt_tree_each_leaf(&morsel->tree, morsel_check_count, &found);
	seq_printf(out, "inode %lu order %u length %llu pages %lld found %llu huge %ld splits %ld ",
		   morsel->inode.i_ino, morsel->order, morsel->length,
		   atomic64_read(&morsel->pages), found, atomic_long_read(&morsel->tree.huge),
		   atomic_long_read(&morsel->tree.splits));
	seq_printf(out, "tables %ld mounts %llu writers %llu wrong %llu reader wrong %llu\n",
		   atomic_long_read(&morsel->tree.tables), morsel->mounts.count, morsel->writers,
		   pt_mounts_wrong(&morsel->mounts), morsel_reader_wrong(morsel));
}

static int morsels_show(struct seq_file *out, void *unused)
{
	struct morsel *morsel;

	mutex_lock(&morsel_list_lock);
	list_for_each_entry(morsel, &morsel_list, node)
		morsel_check_show_one(out, morsel);
	mutex_unlock(&morsel_list_lock);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(morsels);

void morsel_check_init(struct dentry *folder)
{
	debugfs_create_file("morsels", 0400, folder, NULL, &morsels_fops);
}
