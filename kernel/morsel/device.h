/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Persistent memory under a file system: what a machine finds again after it went down, however it
 * did.
 *
 *	page 0			who we are, and where we were (struct morsel_super)
 *	page 1			the guard of trees of order 3
 *	pages 2 ...		slots: a Morsel's name, rights and shape, and where its tables begin
 *	all others		tables and data
 *
 * Tables are there as the processor walks them: a Morsel is mounted by one entry right after a
 * restart, nothing is rebuilt.
 *
 * What is free is not written anywhere. A page is used if a table that can be reached from a slot
 * says so; when the device is mounted all tables are read, which is a 512th of what is there. So
 * nothing that has to be consistent with something else is ever written: an entry, and a slot's
 * first word, are 8 bytes each, which are there or not, and are written only when what they refer to
 * is durable. What was taken and not yet referred to is free again after a crash.
 *
 * Processors see a page only when all entries that lead to it are durable, its own too: else a
 * program could store there, write that back and tell the world, and lose the page with the power.
 * So a leaf is durable without PRESENT first. Recovery takes it for the page's either way.
 */
#ifndef VELLUM_MORSEL_DEVICE_H
#define VELLUM_MORSEL_DEVICE_H

#include <linux/fs.h>
#include <linux/mm.h>
#include <linux/types.h>
#include <vellum/morsel.h>

#include "core/compat.h"
#include "core/pt_tree.h"

#define MORSEL_DEVICE_MAGIC	0x4c4553524f4d4c56ULL	/* "VLMORSEL" */
#define MORSEL_DEVICE_VERSION	1

struct morsel_super {
	u64	magic;
	u64	version;
	u64	pages;		/* of the device */
	u64	slots;
	u64	address;	/* physical, of page 0: entries are physical addresses */
};

struct morsel_slot {
	u64	is_used;	/* 1; written last. 0: nothing else means anything */
	u64	root;		/* the page with the first table; written after the rest. 0: no shape */
	u32	order, mode, uid, gid;
	u64	length, flags, address, seals;
	char	name[256];	/* ends with a zero */
	u8	reserved[184];
};

struct dax_device;
struct dev_pagemap;

struct morsel_device {
	struct pt_source	source;
	own_bdev		*bdev;
	struct dax_device	*dax;
	struct dev_pagemap	*descriptors;	/* of its pages: they stay meanwhile */
	void			*start;
	struct morsel_super	*super;
	struct morsel_slot	*slots;
	u64			pages, first;	/* the first that is for tables and data */

	spinlock_t		lock;		/* protects all below */
	unsigned long		*used;		/* a bit a page */
	unsigned long		*named;		/* a bit a slot */
	u64			next;		/* where to look for a free page */
	/* Pages that are nobody's, and that something still has references to: they wait. */
	unsigned long		*held;
	u64			held_count;
};

/* device.c */
struct morsel_device *morsel_device_open(const char *path, bool format);
void morsel_device_close(struct morsel_device *device);
/* A page of zeros, durable; NULL: there is none. */
struct page *morsel_device_take(struct morsel_device *device);
/* No entry leads to it, durably. It waits, and not the caller, for who has a reference to it. */
void morsel_device_give(struct morsel_device *device, struct page *page);
/* Whether the page is one for tables and data; claims it if nobody else has. */
bool morsel_device_claim(struct morsel_device *device, u64 index);
u64 morsel_device_used(struct morsel_device *device);
void morsel_persist(const void *address, size_t length);

static inline void *morsel_device_page(const struct morsel_device *device, u64 index)
{
	return device->start + (index << PAGE_SHIFT);
}

static inline u64 morsel_device_index(const struct morsel_device *device, u64 entry)
{
	return ((entry & PTE_PFN_MASK) - device->super->address) >> PAGE_SHIFT;
}

/* slots.c */
struct morsel;

struct morsel_slot *morsel_slot_make(struct morsel_device *device, const struct inode *inode,
				     const char *name);
void morsel_slot_erase(struct morsel_device *device, struct morsel_slot *slot);
void morsel_slot_set_shape(struct morsel_device *device, struct morsel_slot *slot,
			   const struct morsel *morsel);
void morsel_slot_set_owner(struct morsel_slot *slot, const struct inode *inode);
void morsel_slot_set_seals(struct morsel_slot *slot, u64 seals);

/* recover.c */
/* Finds out what is used, and makes tables what the kernel expects. EUCLEAN: something is wrong. */
int morsel_device_recover(struct morsel_device *device);
/* Makes tables ordinary pages again. */
void morsel_device_forget_tables(struct morsel_device *device, struct morsel_slot *slot);

#endif /* VELLUM_MORSEL_DEVICE_H */
