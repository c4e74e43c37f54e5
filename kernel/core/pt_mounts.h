/* SPDX-License-Identifier: GPL-2.0 */
/*
 * All mounts of what several processes share: whoever takes leaves off it flushes for all of them.
 *
 * A mount that is not attached needs no flush: it was flushed when it was detached, and what it
 * finds when it is attached again is what is there by then.
 */
#ifndef VELLUM_PT_MOUNTS_H
#define VELLUM_PT_MOUNTS_H

#include <linux/mutex.h>
#include <linux/rbtree.h>
#include <linux/types.h>

struct mm_struct;
struct pt_mount;

struct pt_mounts {
	struct mutex		lock;	/* protects all below; taken before a mount's */
	struct rb_root		tree;	/* by process: those of one follow each other */
	u64			count;
};

void pt_mounts_init(struct pt_mounts *mounts);
/* The process in whose page tables it will be. They outlive the mount's removal. */
void pt_mounts_add(struct pt_mounts *mounts, struct pt_mount *mount, struct mm_struct *process);
void pt_mounts_remove(struct pt_mounts *mounts, struct pt_mount *mount);

/* Each process is flushed once, however often it has the pages mounted. */
/* Translations of the pages. */
void pt_mounts_flush(struct pt_mounts *mounts, u64 page, u64 count);
/* Translations of the pages, and what the processors keep of the tables above. */
void pt_mounts_flush_tables(struct pt_mounts *mounts, u64 page, u64 count);
/*
 * After a flush: secondary MMUs of all who have the pages mounted forget them. May sleep. False: they
 * could not all be told.
 */
bool pt_mounts_tell_secondary(struct pt_mounts *mounts, u64 page, u64 count);
/* Nobody has anything mapped when this returns; a fault attaches a mount again. */
void pt_mounts_detach(struct pt_mounts *mounts);
/* For self-checks: entries in processes that are not what they should be. */
u64 pt_mounts_wrong(struct pt_mounts *mounts);

#endif /* VELLUM_PT_MOUNTS_H */
