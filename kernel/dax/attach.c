// SPDX-License-Identifier: GPL-2.0
/* Attachments: parts of files in slots of a heap. heap.h describes them. */

#include <linux/file.h>
#include <linux/mm.h>
#include <linux/sched/signal.h>
#include <asm/tlbflush.h>

#include "core/pt_flush.h"
#include "core/sized.h"
#include "dax/heap.h"

/* Zombies wait no longer than this. Each keeps its file open. */
#define DAX_ZOMBIE_TIME		(HZ / 20 ?: 1)

/* So often an attachment has its table refreshed. After that faults decide. */
#define DAX_ATTACH_ATTEMPTS	3

static void dax_attachment_let_go(const struct dax_attachment *attachment)
{
	dax_table_put(attachment->table, attachment->file);
	fput(attachment->file);
}

static void dax_attachment_put(struct dax_attachment *attachment)
{
	if (!refcount_dec_and_test(&attachment->references))
		return;
	dax_attachment_let_go(attachment);
	dax_slots_release(attachment->heap, attachment->slot, attachment->count);
}

/* The attachment that has the slot, with a reference; or NULL. */
static struct dax_attachment *dax_attachment_get(struct dax_heap *heap, unsigned int slot)
{
	struct dax_region *region = dax_region_of(heap, slot);
	struct dax_attachment *attachment;

	if (!region)
		return NULL;
	spin_lock(&region->lock);
	attachment = region->slots[slot % DAX_REGION_SLOTS].attachment;
	if (attachment && attachment->is_detached)
		attachment = NULL;
	if (attachment)
		refcount_inc(&attachment->references);
	spin_unlock(&region->lock);
	return attachment;
}

static u64 dax_attachment_end_page(const struct dax_attachment *attachment)
{
	return attachment->page + (u64)attachment->count * PT_ENTRIES;
}

/* The page of the file at an address of a slot of the attachment. */
static u64 dax_attachment_page_at(const struct dax_attachment *attachment, unsigned long addr)
{
	const struct dax_heap *heap = attachment->heap;

	return attachment->page +
	       ((addr - dax_slot_address(heap, attachment->slot)) >> PAGE_SHIFT);
}

/* Takes out slots of the attachment. The region's lock is held. The caller flushes tables. */
static void dax_attachment_take_out(struct dax_attachment *attachment, unsigned int slot,
				    unsigned int count)
{
	while (count--)
		if (dax_slot_take_out(attachment->heap, slot + count))
			WRITE_ONCE(attachment->table->is_stored, true);
}

/* The beginning. */

/* Finds the file and its table. The caller has named a descriptor of the one or of the other. */
static int dax_attachment_find_file(struct dax_attachment *attachment, int descriptor)
{
	struct file *file = fget(descriptor);
	const struct dax_handle *handle;
	struct dax_table *table;
	int error;

	if (!file)
		return -EBADF;
	handle = dax_handle_of(file);
	if (handle) {
		dax_table_get(handle->table);
		attachment->table = handle->table;
		attachment->file = get_file(handle->file);
		attachment->is_durable = handle->flags & VELLUM_DAX_DURABLE;
		attachment->is_synced = !(handle->flags & VELLUM_DAX_NOSYNC);
		fput(file);
		return 0;
	}
	error = dax_check_file(file);
	table = error ? ERR_PTR(error) : dax_table_open(file);
	if (IS_ERR(table)) {
		fput(file);
		return PTR_ERR(table);
	}
	attachment->table = table;
	attachment->file = file;
	attachment->is_synced = true;
	return 0;
}

/* Whether this process may have the file in this heap, and the file system shows it. */
static int dax_attachment_check(struct dax_attachment *attachment)
{
	struct dax_table *table = attachment->table;

	if (attachment->heap->writes &&
	    (!(attachment->file->f_mode & FMODE_WRITE) || IS_APPEND(dax_inode(table))))
		return -EACCES;
	if (attachment->heap->writes && IS_SWAPFILE(dax_inode(table)))
		return -ETXTBSY;
	if (attachment->is_durable && !dax_blocks_can_be_durable(table))
		return -EOPNOTSUPP;
	return dax_heap_ask(attachment->heap, attachment);
}

/* Notes which pages it shows. Without a length it ends where the file does. */
static int dax_attachment_measure(struct dax_attachment *attachment,
				  struct vellum_dax_attach *attach)
{
	u64 size = i_size_read(dax_inode(attachment->table)), slots;
	u64 first = round_down(attach->offset, DAX_SLOT_SIZE);

	if (!attach->length && attach->offset < size)
		attach->length = size - attach->offset;
	if (!attach->length || attach->offset >= VELLUM_DAX_MAX_EXTENT ||
	    attach->length > VELLUM_DAX_MAX_EXTENT - attach->offset)
		return -EINVAL;
	slots = DIV_ROUND_UP(attach->offset + attach->length - first, DAX_SLOT_SIZE);
	if (slots > DAX_REGION_SLOTS)
		return -EFBIG;
	attachment->page = first >> PAGE_SHIFT;
	attachment->count = slots;
	return 0;
}

/* Finds what is to be attached, before there are slots for it. */
static int dax_attachment_find(struct dax_attachment *attachment, struct vellum_dax_attach *attach)
{
	int error = dax_attachment_find_file(attachment, attach->file);

	if (error)
		return error;
	error = dax_attachment_measure(attachment, attach);
	if (!error)
		error = dax_attachment_check(attachment);
	if (error)
		dax_attachment_let_go(attachment);
	return error;
}

/* If zombies are in the way, they go. */
static long dax_attachment_claim(struct dax_attachment *attachment)
{
	long slot = dax_slots_claim(attachment->heap, attachment->count);

	if (slot != -ENOSPC)
		return slot;
	dax_reap(attachment->heap);
	return dax_slots_claim(attachment->heap, attachment->count);
}

/* From now on notices of lost blocks find it, and then faults do. */
static void dax_attachment_publish(struct dax_attachment *attachment)
{
	struct dax_heap *heap = attachment->heap;
	struct dax_region *region = dax_region_of(heap, attachment->slot);
	unsigned int first = attachment->slot % DAX_REGION_SLOTS, i;
	struct dax_table *table = attachment->table;

	if (heap->writes)
		WRITE_ONCE(table->is_written, true);
	WRITE_ONCE(table->was_attached, true);
	spin_lock(&table->attachments_lock);
	list_add_tail(&attachment->node, &table->attachments);
	spin_unlock(&table->attachments_lock);
	spin_lock(&region->lock);
	for (i = 0; i < attachment->count; i++)
		region->slots[first + i].attachment = attachment;
	region->attaches++;
	spin_unlock(&region->lock);
}

/* Puts the file's tables of these slots in. Its invalidation lock is held, and nothing is stale. */
static bool dax_attachment_put_in(struct dax_attachment *attachment, unsigned int slot,
				  unsigned int count)
{
	struct dax_region *region = dax_region_of(attachment->heap, slot);
	u64 page = attachment->page + (u64)(slot - attachment->slot) * PT_ENTRIES;
	struct dax_table *table = attachment->table;
	bool is_in = true;
	pteval_t *leaf;

	down_read(&table->shape);
	spin_lock(&region->lock);
	for (; count-- && !attachment->is_detached; slot++, page += PT_ENTRIES) {
		leaf = page < table->tree.pages ? pt_tree_leaf(&table->tree, page) : NULL;
		is_in &= leaf && dax_slot_put_in(attachment->heap, slot, leaf);
	}
	spin_unlock(&region->lock);
	up_read(&table->shape);
	return is_in;
}

/* Brings the table up to date, and puts it in. If the file changes all the time, faults do that. */
static int dax_attachment_start(struct dax_attachment *attachment)
{
	struct dax_table *table = attachment->table;
	unsigned int attempt;
	int error = 0;
	bool is_right;

	for (attempt = 0; !error && attempt < DAX_ATTACH_ATTEMPTS; attempt++) {
		filemap_invalidate_lock_shared(table->mapping);
		is_right = dax_table_is_current(table, dax_attachment_end_page(attachment));
		if (is_right)
			dax_attachment_put_in(attachment, attachment->slot, attachment->count);
		filemap_invalidate_unlock_shared(table->mapping);
		if (is_right)
			break;
		error = dax_table_refresh(table, attachment->file);
		if (error == -EBUSY)
			error = 0;
	}
	return !error && READ_ONCE(attachment->heap->closed) ? -ENXIO : error;
}

/* The end. */

/* Flushes what CPUs have of the heap: pages, and the tables above. */
static void dax_heap_flush(const struct dax_heap *heap)
{
	pt_flush_tables(heap->mm, 0, TLB_FLUSH_ALL);
}

static void dax_attachment_end(struct dax_attachment *attachment)
{
	struct dax_heap *heap = attachment->heap;
	struct dax_region *region = dax_region_of(heap, attachment->slot);
	unsigned int first = attachment->slot % DAX_REGION_SLOTS, i;
	struct dax_table *table = attachment->table;

	spin_lock(&table->attachments_lock);
	list_del(&attachment->node);
	spin_unlock(&table->attachments_lock);
	spin_lock(&region->lock);
	for (i = 0; i < attachment->count; i++)
		region->slots[first + i].attachment = NULL;
	spin_unlock(&region->lock);
	dax_attachment_put(attachment);
}

static void dax_reap_locked(struct dax_heap *heap)
{
	struct llist_node *zombies = llist_del_all(&heap->zombies);
	struct dax_attachment *attachment, *next;

	lockdep_assert_held(&heap->reap_lock);
	if (!zombies)
		return;
	dax_heap_flush(heap);
	atomic64_inc(&heap->flushes);
	llist_for_each_entry_safe(attachment, next, zombies, zombie) {
		atomic_dec(&heap->zombie_count);
		dax_attachment_end(attachment);
	}
}

void dax_reap(struct dax_heap *heap)
{
	mutex_lock(&heap->reap_lock);
	dax_reap_locked(heap);
	mutex_unlock(&heap->reap_lock);
}

/* Takes the attachment out. The region's lock is held, and it was not detached. */
static void dax_attachment_detach(struct dax_attachment *attachment)
{
	struct dax_region *region = dax_region_of(attachment->heap, attachment->slot);

	lockdep_assert_held(&region->lock);
	attachment->is_detached = true;
	region->detaches++;
	dax_attachment_take_out(attachment, attachment->slot, attachment->count);
}

/* Makes a zombie of what was detached. Of a heap that is closed no other thread reaps it. */
static void dax_attachment_bury(struct dax_attachment *attachment)
{
	struct dax_heap *heap = attachment->heap;

	bool is_batch;

	llist_add(&attachment->zombie, &heap->zombies);
	is_batch = atomic_inc_return(&heap->zombie_count) >= heap->batch;
	if (READ_ONCE(heap->closed)) {
		dax_reap(heap);
	} else if (is_batch && mutex_trylock(&heap->reap_lock)) {
		dax_reap_locked(heap);
		mutex_unlock(&heap->reap_lock);
	} else if (!delayed_work_pending(&heap->reaping)) {
		queue_delayed_work(dax_end_work, &heap->reaping, DAX_ZOMBIE_TIME);
	}
}

/* Detaches whatever is there, or nothing but this attachment. */
static int dax_detach_at(struct dax_heap *heap, unsigned long address,
			 const struct dax_attachment *only)
{
	struct dax_attachment *attachment;
	struct dax_region *region;
	unsigned int slot;

	if (!dax_heap_regions(heap) || address < heap->start || address >= heap->end)
		return -EINVAL;
	slot = (address - heap->start) / DAX_SLOT_SIZE;
	region = dax_region_of(heap, slot);
	if (!region)
		return -EINVAL;
	spin_lock(&region->lock);
	attachment = region->slots[slot % DAX_REGION_SLOTS].attachment;
	if (attachment && !attachment->is_detached && (!only || attachment == only))
		dax_attachment_detach(attachment);
	else
		attachment = NULL;
	spin_unlock(&region->lock);
	if (!attachment)
		return -EINVAL;
	dax_attachment_bury(attachment);
	return 0;
}

int dax_detach(struct dax_heap *heap, unsigned long address)
{
	return dax_detach_at(heap, address, NULL);
}

void dax_detach_all(struct dax_heap *heap)
{
	struct dax_attachment *attachment;
	struct dax_region *region;
	unsigned int r, i;

	for (r = 0; r < dax_heap_regions(heap); r++) {
		region = dax_region_of(heap, r * DAX_REGION_SLOTS);
		if (!region)
			continue;
		spin_lock(&region->lock);
		for_each_set_bit(i, region->taken, DAX_REGION_SLOTS) {
			attachment = region->slots[i].attachment;
			if (!attachment || attachment->is_detached)
				continue;
			dax_attachment_detach(attachment);
			llist_add(&attachment->zombie, &heap->zombies);
			atomic_inc(&heap->zombie_count);
		}
		spin_unlock(&region->lock);
	}
	cancel_delayed_work_sync(&heap->reaping);
	dax_reap(heap);
}

/* Once it is published, another thread may detach it. The caller has a reference of its own. */
static struct dax_attachment *dax_attachment_place(const struct dax_attachment *found, long slot)
{
	struct dax_region *region = dax_region_of(found->heap, slot);
	struct dax_attachment *attachment = &region->attachments[slot % DAX_REGION_SLOTS];

	*attachment = *found;
	attachment->slot = slot;
	refcount_set(&attachment->references, 2);
	dax_attachment_publish(attachment);
	return attachment;
}

long dax_attach(struct dax_heap *heap, unsigned long argument)
{
	struct dax_attachment found = { .heap = heap }, *attachment;
	struct vellum_dax_attach attach = {};
	int size = vellum_copy_sized(&attach, sizeof(attach), sizeof(attach), argument);
	long slot, error;

	if (size < 0)
		return size;
	error = dax_attachment_find(&found, &attach);
	if (error)
		return error;
	slot = dax_attachment_claim(&found);
	if (slot < 0) {
		dax_attachment_let_go(&found);
		return slot;
	}
	attachment = dax_attachment_place(&found, slot);
	attach.address = dax_slot_address(heap, slot) + attach.offset % DAX_SLOT_SIZE;
	error = dax_attachment_start(attachment);
	if (!error)
		error = vellum_answer_sized(argument, size, &attach, sizeof(attach));
	if (error)
		dax_detach_at(heap, attach.address, attachment);
	else
		file_accessed(attachment->file);
	dax_attachment_put(attachment);
	return error;
}

/* Faults. */

/* Whether the table shows the page, and is in the slot now. */
static bool dax_attachment_fault_in_table(struct dax_attachment *attachment, unsigned int slot,
					  u64 page)
{
	unsigned long addr = dax_slot_address(attachment->heap, slot);
	struct dax_table *table = attachment->table;
	bool is_in = false;

	if (dax_slot_is_served(attachment->heap, slot))
		return false;
	filemap_invalidate_lock_shared(table->mapping);
	if (dax_table_shows(table, page))
		is_in = dax_attachment_put_in(attachment, slot, 1);
	filemap_invalidate_unlock_shared(table->mapping);
	/* This CPU may have cached the slot's own table. */
	if (is_in)
		pt_flush_tables(attachment->heap->mm, addr, addr + DAX_SLOT_SIZE);
	return is_in;
}

static bool dax_attachment_serve(struct dax_attachment *attachment, unsigned int slot)
{
	struct dax_region *region = dax_region_of(attachment->heap, slot);
	bool is_served = false;

	spin_lock(&region->lock);
	/* The fault may have waited until after the end of the attachment. */
	if (!attachment->is_detached) {
		dax_table_refresh_later(attachment->table, attachment->file);
		is_served = dax_slot_serve(attachment->heap, slot);
	}
	region->served_faults += is_served;
	spin_unlock(&region->lock);
	return is_served;
}

/*
 * Gives the page the leaf that the file system has made, unless pages of the file were unmapped
 * meanwhile, or the slot was taken out. Then the access faults once more.
 */
static void dax_attachment_put_leaf(struct dax_attachment *attachment, unsigned int slot, u64 page,
				    pteval_t leaf, u64 unmaps)
{
	struct dax_heap *heap = attachment->heap;
	struct dax_region *region = dax_region_of(heap, slot);

	spin_lock(&region->lock);
	if (!attachment->is_detached && dax_table_unmaps(attachment->table) == unmaps)
		dax_slot_put_leaf(heap, slot, page % PT_ENTRIES, leaf);
	spin_unlock(&region->lock);
}

static vm_fault_t dax_attachment_fault_in_file(struct dax_attachment *attachment,
					       unsigned int slot, u64 page, struct vm_fault *vmf,
					       bool is_mkwrite)
{
	struct dax_table *table = attachment->table;
	vm_fault_t outcome;
	pteval_t leaf = 0;
	u64 unmaps;

	dax_table_misses(table, page);
	if (!dax_attachment_serve(attachment, slot))
		return READ_ONCE(attachment->heap->closed) ? VM_FAULT_SIGBUS : VM_FAULT_NOPAGE;
	unmaps = dax_table_unmaps(table);
	outcome = dax_scratch_fault(attachment, vmf, page, is_mkwrite, &leaf);
	if (leaf)
		dax_attachment_put_leaf(attachment, slot, page, leaf, unmaps);
	return outcome;
}

/* The mmap lock is held, so the VMA is there. */
vm_fault_t dax_attachment_fault(struct dax_heap *heap, struct vm_fault *vmf, bool is_mkwrite)
{
	unsigned int slot = (vmf->address - heap->start) / DAX_SLOT_SIZE;
	struct dax_attachment *attachment = dax_attachment_get(heap, slot);
	vm_fault_t outcome = VM_FAULT_NOPAGE;
	u64 page;

	if (!attachment)
		return VM_FAULT_SIGSEGV;
	page = dax_attachment_page_at(attachment, vmf->address);
	if (!dax_attachment_fault_in_table(attachment, slot, page))
		outcome = dax_attachment_fault_in_file(attachment, slot, page, vmf, is_mkwrite);
	dax_attachment_put(attachment);
	return outcome;
}

/* What happens to the file. */

/* The slots of the attachment that show any of these pages. */
static unsigned int dax_attachment_slots(const struct dax_attachment *attachment, u64 first,
					 u64 end, unsigned int *slot)
{
	u64 last = dax_attachment_end_page(attachment);

	first = max(first, attachment->page);
	last = min(end, last);
	if (first >= last)
		return 0;
	*slot = attachment->slot + (first - attachment->page) / PT_ENTRIES;
	return attachment->slot + DIV_ROUND_UP(last - attachment->page, PT_ENTRIES) - *slot;
}

/* Takes out the slots that show any of these pages. False: there are none. */
static bool dax_attachment_lose(struct dax_attachment *attachment, u64 first, u64 end)
{
	unsigned int slot, count = dax_attachment_slots(attachment, first, end, &slot);
	struct dax_region *region;

	if (!count)
		return false;
	region = dax_region_of(attachment->heap, slot);
	spin_lock(&region->lock);
	dax_attachment_take_out(attachment, slot, count);
	spin_unlock(&region->lock);
	return true;
}

/* Attachments to the same heap are often in a row. They are flushed together, after the last. */
static void dax_heap_flush_after(struct dax_heap **pending, struct dax_heap *next)
{
	if (*pending && *pending != next)
		dax_heap_flush(*pending);
	*pending = next;
}

/* Zombies have nothing in their slots, and may be in TLBs. */
void dax_attachments_lose(struct dax_table *table, u64 first, u64 end)
{
	struct dax_attachment *attachment;
	struct dax_heap *pending = NULL;

	spin_lock(&table->attachments_lock);
	list_for_each_entry(attachment, &table->attachments, node)
		if (dax_attachment_lose(attachment, first, end))
			dax_heap_flush_after(&pending, attachment->heap);
	dax_heap_flush_after(&pending, NULL);
	spin_unlock(&table->attachments_lock);
}

void dax_attachments_flush(struct dax_table *table, u64 first, u64 end)
{
	struct dax_attachment *attachment;
	struct dax_heap *pending = NULL;
	unsigned int slot;

	spin_lock(&table->attachments_lock);
	list_for_each_entry(attachment, &table->attachments, node)
		if (dax_attachment_slots(attachment, first, end, &slot) &&
		    !READ_ONCE(attachment->is_detached))
			dax_heap_flush_after(&pending, attachment->heap);
	dax_heap_flush_after(&pending, NULL);
	spin_unlock(&table->attachments_lock);
}

/*
 * Gets references to as many attachments as there is room for, the oldest first, and to their
 * heaps. A heap is there as long as an attachment is among those of the table.
 */
static u64 dax_attachments_get(struct dax_table *table, struct dax_attachment **attachments,
			       u64 room)
{
	struct dax_attachment *attachment;
	u64 count = 0;

	spin_lock(&table->attachments_lock);
	list_for_each_entry(attachment, &table->attachments, node) {
		if (count < room) {
			dax_heap_get(attachment->heap);
			refcount_inc(&attachment->references);
			attachments[count] = attachment;
		}
		count++;
	}
	spin_unlock(&table->attachments_lock);
	return count;
}

/* Slot by slot, because writing back takes long. */
static void dax_attachment_empty(struct dax_attachment *attachment, u64 first, u64 end)
{
	unsigned int slot, count = dax_attachment_slots(attachment, first, end, &slot);
	struct dax_region *region = dax_region_of(attachment->heap, attachment->slot);

	for (; count--; slot++) {
		if (!dax_slot_is_served(attachment->heap, slot))
			continue;
		spin_lock(&region->lock);
		/* The slot may be another file's by now. */
		if (!attachment->is_detached && dax_slot_is_served(attachment->heap, slot))
			dax_attachment_take_out(attachment, slot, 1);
		spin_unlock(&region->lock);
		cond_resched();
	}
}

void dax_attachments_empty(struct dax_table *table, u64 first, u64 end)
{
	u64 room = dax_attachments_get(table, NULL, 0), count, i;
	struct dax_attachment **attachments;
	struct dax_heap *heap;

	if (!room)
		return;
	attachments = kvmalloc_array(room, sizeof(*attachments), GFP_KERNEL | __GFP_NOFAIL);
	count = min(room, dax_attachments_get(table, attachments, room));
	for (i = 0; i < count; i++) {
		heap = attachments[i]->heap;
		dax_attachment_empty(attachments[i], first, end);
		dax_attachment_put(attachments[i]);
		dax_heap_put(heap);
	}
	kvfree(attachments);
}

u64 dax_attachments_count(struct dax_table *table)
{
	return dax_attachments_get(table, NULL, 0);
}

u64 dax_attachments_wrong(struct dax_table *table)
{
	struct dax_attachment *attachment;
	struct dax_region *region;
	u64 wrong = 0;

	spin_lock(&table->attachments_lock);
	list_for_each_entry(attachment, &table->attachments, node) {
		region = dax_region_of(attachment->heap, attachment->slot);
		spin_lock(&region->lock);
		if (!attachment->is_detached)
			wrong += dax_slots_wrong(attachment->heap, attachment->slot,
						 attachment->count);
		spin_unlock(&region->lock);
	}
	spin_unlock(&table->attachments_lock);
	return wrong;
}

/* Makes durable what was stored to a part of the heap. */
int dax_attachments_sync(struct dax_heap *heap, loff_t start, loff_t end, int datasync)
{
	u64 slots = (u64)dax_heap_regions(heap) * DAX_REGION_SLOTS;
	u64 slot = start / DAX_SLOT_SIZE, last = min_t(u64, slots, end / DAX_SLOT_SIZE + 1);
	struct dax_attachment *attachment;
	int error = 0, outcome;

	for (; slot < last; slot++) {
		if (fatal_signal_pending(current))
			return -EINTR;
		attachment = dax_attachment_get(heap, slot);
		if (!attachment)
			continue;
		outcome = 0;
		if (attachment->is_synced)
			outcome = dax_sync(attachment->table, attachment->file,
					   (loff_t)attachment->page << PAGE_SHIFT,
					   ((loff_t)dax_attachment_end_page(attachment) <<
					    PAGE_SHIFT) - 1, datasync);
		error = error ?: outcome;
		slot = attachment->slot + attachment->count - 1;
		dax_attachment_put(attachment);
		cond_resched();
	}
	return error;
}
